"""Orders that are drawn: how often they find a bug of a known depth, against the bound; and beyond a search's most."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch.distributed as dist

from fsdpcheck import search
from fsdpcheck.report import simulation as report
from fsdpcheck.report.colour import Paint
from fsdpcheck.simulation.decisions import Access, Decisions, Option
from fsdpcheck.simulation.priorities import Drawn, Priorities, choices, takers
from fsdpcheck.simulation.search import some_orders
from fsdpcheck.simulation.simulate import Options, Simulation, simulated

SEEDS = 40


def plain(text: str, *_: object) -> str:
    return text


PAINT: Paint = plain  # type: ignore[assignment]


def store() -> dist.Store:
    found = dist.distributed_c10d._get_default_store()
    assert isinstance(found, dist.Store)
    return found


def loses_an_update() -> object:
    """Both ranks read before either has written: two events in a certain order, so of depth 2."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        store().set("total", "0")
    dist.barrier()
    store().set("total", str(int(store().get("total")) + 1))
    dist.barrier()
    return store().get("total")


def numbers_itself() -> int:
    """Whoever comes first: depth 1."""
    dist.init_process_group("gloo")
    return store().add("tickets", 1)


def run(program: Callable[[], object], decisions: Decisions) -> Simulation:
    return simulated(program, 2, (), {}, Options(show=False, decisions=decisions))


@pytest.mark.nightly
def test_a_bug_of_depth_2_is_found_as_often_as_is_promised_and_never_at_depth_1() -> None:
    """The bound is the theorem's, so the count is compared with it as it is."""
    found: Counter[int] = Counter()
    most, who = 0, set[str]()
    for seed in range(SEEDS):
        for depth in (1, 2):
            decisions = Decisions((), Priorities(random.Random(seed), 4, depth).choose)
            found[depth] += run(loses_an_update, decisions).returned[0] == b"1"
            most, who = max(most, choices(decisions.taken)), who | takers(decisions.taken)
    assert (most, who) == (4, {"rank 0", "rank 1"}), "next: give Priorities the choices that the program has"
    assert found[1] == 0, "without a change of priorities each rank reads and writes in one go"
    assert found[2] >= SEEDS * Drawn(SEEDS, 2, len(who), most, SEEDS).chance


def test_a_bug_of_depth_1_is_found_by_priorities_alone() -> None:
    drawn = [run(numbers_itself, Decisions((), Priorities(random.Random(n), 1, 1).choose)) for n in range(10)]
    assert {done.returned for done in drawn} == {(1, 2), (2, 1)}


def _options(*takers: str) -> list[Option]:
    return [Option(taker, taker, Access(0, (), True), lambda: None, taker) for taker in takers]


def test_the_highest_goes_until_it_is_put_behind_all_others() -> None:
    for seed in range(20):
        priorities = Priorities(random.Random(seed), 4, 2)
        went = [priorities.choose(_options("a", "b", "c")).taker for _ in range(4)]
        (change,) = priorities._changes
        assert len({*went[:change]}) <= 1
        assert len({*went[change:]}) == 1
        assert not {*went[:change]} & {*went[change:]}
        alone = priorities.choose(_options("a"))  # no choice, and none that counts
        assert (alone.taker, priorities._made) == ("a", 4)


@pytest.mark.parametrize(
    ("drawn", "chance", "said"),
    [
        (Drawn(20, 1, 3, 7, 20), Fraction(1, 3), "1/(3)"),
        (Drawn(20, 2, 3, 7, 20), Fraction(1, 21), "1/(3 * 7)"),
        (Drawn(20, 3, 3, 7, 20), Fraction(1, 147), "1/(3 * 7^2)"),
    ],
)
def test_the_bound_is_said_as_it_is(drawn: Drawn, chance: Fraction, said: str) -> None:
    assert drawn.chance == chance
    assert f"; each finds a bug of order of depth {drawn.depth} with probability {said} or more" in str(drawn)
    assert str(drawn).endswith(", if no order has more than 7 choices among 3")


def test_beyond_the_most_orders_are_drawn_and_the_report_says_which_were() -> None:
    def counts() -> object:
        dist.init_process_group("gloo")
        for _ in range(2):
            store().add("arrived", 1)
        dist.barrier()
        return store().get("arrived")

    found = search(counts, 2, most=3, drawn=5)
    assert (found.schedules, found.complete, found.proved) == (8, False, False)
    assert found.drawn is not None
    assert (found.drawn.orders, found.drawn.takers) == (5, 2)
    assert found.drawn.counted == 5, "next: take another program; this one has shown all its choices by then"
    text = report.ending(found, PAINT)
    assert "  8 orders of ranks were run; another may end otherwise\n  drawn   5 of these orders; each finds" in text
    told = report.document(found, [])
    assert told["drawn"] == {
        "orders": 5, "depth": 2, "takers": 2, "choices": found.drawn.choices, "counted": found.drawn.counted,
        "chance": str(found.drawn.chance),
    }  # fmt: skip
    whole = search(counts, 2)
    assert whole.proved
    assert f"  all {whole.schedules} orders of ranks that could end otherwise were run" in report.ending(whole, PAINT)


def test_what_the_first_orders_hide_is_found_by_those_that_are_drawn() -> None:
    assert search(loses_an_update, 2, most=1, drawn=0).simulation.failure is None
    found = search(loses_an_update, 2, most=1, drawn=60)
    assert found.simulation.failure is not None
    assert found.simulation.failure.kind == "order"
    assert found.drawn is not None
    drawn = some_orders(lambda decisions: run(loses_an_update, decisions), 61)
    assert (drawn.order, drawn.drawn) == (found.order, found.drawn)


def test_orders_that_were_drawn_for_fewer_choices_are_not_counted() -> None:
    """Rank 1 that comes first goes on to count three times more, so the first order has the fewest choices."""

    def program() -> None:
        dist.init_process_group("gloo")
        if store().add("first", 1) == 1 and dist.get_rank() == 1:
            for _ in range(3):
                store().add("more", 1)
        else:
            store().add("more", 1)

    found = search(program, 2, most=1, drawn=12)
    assert found.drawn is not None
    assert 0 < found.drawn.counted < found.drawn.orders == 12
    assert f"; each of the last {found.drawn.counted} finds a bug" in str(found.drawn)
