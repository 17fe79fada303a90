"""The same difference with smaller numbers: what is tried, and what counts as the same."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.facts import Fact
from fsdpcheck.comparison.results import Comparison, World
from fsdpcheck.comparison.smaller import smaller
from fsdpcheck.execution import Failure

_LINE = read("train.py --width {width:8} --layers {layers:5}")
_WRONG = World(4, "differs", fact=Fact(0, "option", "lr"))


def _found(*worlds: World) -> Comparison:
    return Comparison(_LINE, 1, worlds)


def test_each_number_is_lowered_while_the_smallest_world_differs_alike() -> None:
    asked: list[tuple[int, dict[str, int]]] = []

    def again(ranks: int, marked: Mapping[str, int]) -> Comparison:
        asked.append((ranks, dict(marked)))
        return _found(_WRONG if marked["width"] > 2 else World(ranks, "agrees"))

    less = smaller(_found(World(2, "agrees"), World(8, "differs", fact=Fact(0, "option", "lr")), _WRONG), again)
    assert less is not None
    assert (dict(less.marked), less.tried) == ({"width": 4, "layers": 1}, 4)
    assert asked == [(4, {"width": width, "layers": 5}) for width in (1, 2, 4)] + [(4, {"width": 4, "layers": 1})]


def test_another_difference_is_not_the_same() -> None:
    others = iter(
        [World(4, "differs", fact=Fact(0, "data", "rows")), World(4, "fails", Failure("deadlock", "")), _WRONG]
    )
    less = smaller(_found(_WRONG), lambda ranks, marked: _found(next(others, World(4, "agrees"))))
    assert less is not None
    assert dict(less.marked) == {"width": 4, "layers": 5}


def test_a_number_at_which_nothing_could_be_compared_is_passed_over() -> None:
    less = smaller(_found(_WRONG), lambda ranks, marked: _found())
    assert less is not None
    assert dict(less.marked) == {"width": 8, "layers": 5}


def test_nothing_is_tried_where_nothing_differs_or_nothing_is_marked() -> None:
    def never(ranks: int, marked: Mapping[str, int]) -> Comparison:
        raise AssertionError((ranks, marked))

    assert smaller(_found(World(2, "agrees")), never) is None
    assert smaller(Comparison(read("train.py"), 1, (_WRONG,)), never) is None
