"""Strategies for tests of a user's own: what they draw, how they shrink, tokens as examples, Hypothesis' database."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import find, given, settings
from hypothesis.database import InMemoryExampleDatabase

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.errors import InvalidToken, UsageError
from fsdpcheck.findings import tokens
from fsdpcheck.strategies import PRIVATE_PROBE, case_of, cases, example, layouts, meshes, shapes, worlds

CASE = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(3), BatchLayout("contiguous", 2))
TOKEN = tokens.encode(tokens.Token("training.plain", "ddp", CASE))
FEW = settings(max_examples=60, derandomize=True, database=None, deadline=None)


def _drawn(strategy: Any) -> list[Any]:
    found: list[Any] = []
    FEW(given(strategy)(lambda value: found.append(value)))()
    return found


def test_worlds_and_meshes_have_the_ranks_and_axes_that_are_asked_for() -> None:
    assert {*_drawn(worlds(2, 4))} == {2, 3, 4}
    drawn = _drawn(meshes((4, 6)))
    assert {mesh.world_size for mesh in drawn} == {4, 6}
    assert {mesh.dp_replicate for mesh in drawn} >= {1, 2, 3}
    tensor_parallel = _drawn(meshes((4,), axes=("dp_shard", "tp")))
    assert {mesh.axes for mesh in tensor_parallel} == {(), (("tp", 2),), (("tp", 4),)}
    assert all(mesh.world_size == 4 for mesh in tensor_parallel)


def test_shapes_stand_around_the_number_of_ranks() -> None:
    drawn = _drawn(shapes(4, dims=(2, 3)))
    assert {shape[0] for shape in drawn} == {1, 3, 4, 5, 7, 8, 9}
    assert {len(shape) for shape in drawn} == {2, 3}


def test_layouts_have_a_list_a_rank_of_every_kind() -> None:
    drawn = _drawn(layouts(3))
    assert all(len(layout) == 3 and any(layout) for layout in drawn)
    assert any(() in layout for layout in drawn)
    assert any(len({*layout}) == 1 and layout[0] for layout in drawn)
    assert any(len({len(own) for own in layout}) > 1 for layout in drawn)


def test_cases_are_those_that_the_traits_and_the_space_allow() -> None:
    plain = _drawn(cases(accepts={"bias"}, world_sizes=(2,)))
    assert {case.world_size for case in plain} == {2}
    assert {trait for case in plain for trait in case.requires()} == {"bias"}
    private = _drawn(cases(PRIVATE_PROBE, promises=("private",), world_sizes=(1, 2)))
    assert {case.step.clipping for case in private} == {"probe"}


def test_what_fails_shrinks_to_the_smallest() -> None:
    assert find(cases(), lambda case: case.world_size > 1, settings=FEW).world_size == 2
    assert find(meshes(), lambda mesh: True, settings=FEW) == MeshSpec(1)
    assert find(shapes(3), lambda shape: shape[0] > 3, settings=FEW) == (4,)
    assert find(layouts(2), lambda layout: True, settings=FEW) in (((0,), ()), ((0,), (0,)), ((0,), (1,)))


def test_a_token_is_an_example_of_a_given_test() -> None:
    """Whether its argument is named or not, it is the first case that the test is given."""
    named: list[Any] = []
    FEW(example(case=TOKEN)(given(case=cases(world_sizes=(1,)))(lambda case: named.append(case))))()
    placed: list[Any] = []
    FEW(example(TOKEN)(given(cases(world_sizes=(1,)))(lambda case: placed.append(case))))()
    assert named[0] == placed[0] == CASE == case_of(TOKEN)
    assert len(named) > 1
    assert all(case.world_size == 1 for case in named[1:])


def test_a_failure_is_kept_in_the_database_and_comes_first_again() -> None:
    database, seen = InMemoryExampleDatabase(), list[Any]()

    def body(case: Any) -> None:
        seen.append(case)
        assert case.world_size < 3

    test = settings(FEW, derandomize=False, database=database)(given(case=cases())(body))
    with pytest.raises(AssertionError):
        test()
    smallest = seen[-1]
    seen.clear()
    with pytest.raises(AssertionError):
        test()
    assert seen[0] == smallest
    assert smallest.world_size == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: worlds(0), "there are no such numbers of ranks"),
        (lambda: worlds(3, 2), "got     3 to 2"),
        (lambda: meshes(()), "there are no such numbers of ranks"),
        (lambda: meshes((2,), axes=("dp",)), "there are no such axes"),  # type: ignore[arg-type]
        (lambda: shapes(0), "there are no such numbers of ranks"),
        (lambda: shapes(2, dims=(0, 2)), "a shape has dims"),
        (lambda: layouts(0), "there are no such numbers of ranks"),
        (lambda: cases(world_sizes=(2, 99)), "there are no such numbers of ranks"),
    ],
)
def test_what_cannot_be_drawn_is_said_at_once(wrong: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wrong()


def test_a_text_that_is_no_token_is_no_example() -> None:
    with pytest.raises(InvalidToken, match="cut short"):
        example(TOKEN[:-9])
