"""Facts: what W ranks must have exactly as one has it."""

from __future__ import annotations

import pytest

from fsdpcheck.comparison.facts import Fact, differing, first
from fsdpcheck.comparison.observation.whole import assembled
from fsdpcheck.comparison.record import Key, Observation
from tests.comparison.observed import observation, rank

W, G, LR = Key(0, "parameter", "w"), Key(0, "gradient", "w"), Key(0, "option lr", "w")


def _facts(base: Observation, run: Observation) -> list[Fact]:
    return differing(base, assembled(base), run, assembled(run))


def test_ranks_that_share_the_work_of_one_differ_in_nothing() -> None:
    base = observation(rank({W: [1, 2], LR: [0.1]}, {0: [("abcd", "1122")]}))
    run = observation(*(rank({W: [1, 2], LR: [0.1]}, {0: [given]}) for given in (("ac", "12"), ("db", "21"))))
    assert _facts(base, run) == []


def test_rows_that_each_of_two_ranks_is_given_are_those_of_one_up_to_a_factor() -> None:
    base = observation(rank({}, {0: [("ab", "12")]}))
    assert _facts(base, observation(*[rank({}, {0: [("ab", "12")]})] * 2)) == []


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ([("ab", "11"), ("ab", "11")], "data", "2 of one rank are left out"),
        (
            [("abcd", "1122"), ("efgh", "1122")],
            "data",
            "8 where one rank has 4: a rank takes as many on each number; to keep the batch, divide it",
        ),
        ([("ab", "11"), ("ce", "22")], "data", "1 of 4 are others (1 of rank 1), which one rank never meets"),
        ([("ab", "11"), ("cx", "22")], "data", "1 of 4 are others (1 of rank 1), which one rank meets at step 1"),
        ([("abc", "112"), ("cd", "22")], "data", "some come 2 times, where one rank has them 1 times"),
        ([("ab", "11"), ("cd", "12")], "labels", "some come 3 times, where one rank has them 2 times"),
        ([("ab", "12"), ("cd", "12")], "pairs", "2 of 4 are others"),
        ([("ab", ""), ("cd", "")], "labels", "2 ranks are given no labels at step 0, one rank 4"),
    ],
)
def test_data_that_is_not_that_of_one_rank_is_named(given: list[tuple[str, str]], kind: str, said: str) -> None:
    base = observation(rank({}, {0: [("abcd", "1122")], 1: [("wxyz", "3333")]}, (2,)))
    run = observation(*(rank({}, {0: [each], 1: [("wxyz", "3333")]}, (2,)) for each in given))
    fact = first(_facts(base, run))
    assert fact is not None
    assert (fact.step, fact.kind) == (0, kind)
    assert said in fact.text


def test_a_rank_that_makes_another_number_of_steps_is_named() -> None:
    base, run = observation(rank(steps=(4,))), observation(rank(steps=(4,)), rank(steps=(3,)))
    (fact,) = _facts(base, run)
    assert fact.text == "ranks do not step equally often: rank 0 4 steps; rank 1 3 steps; one rank makes 4 steps"
    assert fact.step == 0  # where they part is not known
    both = observation(rank(steps=(3,)), rank(steps=(3,)))
    assert [(fact.step, fact.text) for fact in _facts(base, both)] == [
        (3, "rank 0 makes 3 steps, where one rank makes 4 steps")
    ]


def test_an_option_that_one_rank_has_otherwise_is_named_with_both_values() -> None:
    base, run = observation(rank({LR: [0.1]})), observation(rank({LR: [0.1]}), rank({LR: [0.2]}))
    assert [fact.text for fact in _facts(base, run)] == ["lr of w is 0.2 on rank 1 at step 0, where one rank has 0.1"]


def test_replicas_that_differ_are_named_by_the_first_observable_of_the_step() -> None:
    base = observation(rank({G: [1.0], W: [2.0]}))
    run = observation(rank({G: [1.0], W: [2.0]}), rank({G: [1.5], W: [2.5]}))
    assert [fact.text for fact in _facts(base, run)] == [
        "ranks 0 and 1 hold replicas of gradient of w at step 0 that differ by 0.5"
    ]


def test_of_several_facts_the_first_step_and_the_cause_is_told() -> None:
    base = observation(rank({Key(1, "parameter", "w"): [1.0]}, {0: [("ab", "")], 1: [("cd", "")]}, (2,)))
    run = observation(
        rank({Key(1, "parameter", "w"): [1.0]}, {0: [("ab", "")], 1: [("ce", "")]}, (2,)),
        rank({Key(1, "parameter", "w"): [3.0]}, {0: [("ab", "")], 1: [("cd", "")]}, (2,)),
    )
    facts = _facts(base, run)
    assert {fact.kind for fact in facts} == {"data", "replicas"}
    found = first(facts)
    assert found is not None
    assert (found.step, found.kind) == (1, "data")
