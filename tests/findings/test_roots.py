"""Which findings are one root: failures by line, wrong values by cause, first wrong quantity and single changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck.findings.roots import OF_NORMS, OTHER_NUMBERS, grouped, same
from fsdpcheck.findings.verdict import Finding

TEXTS = ("law", "guarantee", "adapter", "engine", "what", "got", "wanted", "where", "words", "token")
FINDING = Finding(**dict.fromkeys(TEXTS, "x"), kind="value", place="", cause="", case={})  # type: ignore[arg-type]
ONE_BATCH = replace(FINDING, quantity="gradient", holds_with=("one micro-batch",), breaks_with=("one rank", "no bias"))
BY_NUMBERS = replace(ONE_BATCH, quantity="", holds_with=("one micro-batch", OTHER_NUMBERS))


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (replace(FINDING, kind="lost", place="a.py:1"), replace(FINDING, kind="lost", place="a.py:1", got="y"), True),
        (replace(FINDING, kind="raised", place="a.py:1"), replace(FINDING, kind="raised", place="a.py:2"), False),
        (replace(FINDING, kind="raised", place="a.py:1"), replace(FINDING, kind="deadlock", place="a.py:1"), False),
        (replace(FINDING, cause="W = 2 times"), replace(FINDING, cause="W = 3 times", what="y"), True),
        (replace(FINDING, cause="W = 2 times"), replace(FINDING, cause="N = 2 times"), False),
        (replace(FINDING, cause="norms of rank 2"), replace(FINDING, cause=OF_NORMS + "norms of rank 3"), True),
        (replace(FINDING, cause="z"), replace(FINDING, cause=OF_NORMS + "y"), False),
        (replace(FINDING, cause="no term (head)"), replace(FINDING, cause=OF_NORMS + "no term (a and b)"), True),
        (replace(FINDING, cause="no term (head)"), replace(FINDING, cause="rows not merged (head)"), False),
        (FINDING, replace(FINDING, what="y"), False),
        (FINDING, replace(FINDING, law="y"), True),
        (ONE_BATCH, FINDING, False),
        (ONE_BATCH, replace(FINDING, law="y"), True),
        (ONE_BATCH, replace(ONE_BATCH, what="y", breaks_with=("SGD",)), True),
        (ONE_BATCH, replace(ONE_BATCH, what="y", cause="z"), True),
        (ONE_BATCH, replace(ONE_BATCH, what="y", quantity=""), True),
        (ONE_BATCH, replace(ONE_BATCH, quantity="updated"), False),
        (ONE_BATCH, replace(ONE_BATCH, holds_with=("no bias",), breaks_with=("one rank",)), False),
        (ONE_BATCH, replace(ONE_BATCH, holds_with=("nothing tied",), breaks_with=("one rank",)), False),
        (ONE_BATCH, replace(ONE_BATCH, holds_with=(), breaks_with=("one rank",)), False),
        (BY_NUMBERS, replace(ONE_BATCH, law="y", breaks_with=(OTHER_NUMBERS,)), True),
        (BY_NUMBERS, replace(FINDING, law="y", holds_with=(OTHER_NUMBERS,)), False),
        (
            replace(ONE_BATCH, holds_with=(), breaks_with=("one rank",)),
            replace(ONE_BATCH, holds_with=(), breaks_with=("SGD",)),
            True,
        ),
        (
            replace(ONE_BATCH, quantity="", holds_with=(), breaks_with=("one rank",)),
            replace(ONE_BATCH, what="y", holds_with=(), breaks_with=("one rank",)),
            False,
        ),
    ],
)  # fmt: skip
def test_which_findings_are_one_root(one: Finding, other: Finding, wanted: bool) -> None:
    assert (same(one, other), same(other, one)) == (wanted, wanted)


def test_groups_are_in_the_order_of_their_first_findings() -> None:
    second, third = replace(FINDING, cause="second"), replace(FINDING, law="y")
    assert grouped([FINDING, second, third]) == [[FINDING, third], [second]]


def test_a_finding_that_is_like_two_groups_makes_them_one() -> None:
    """Of a sum that is not averaged: a wrong norm, an update without a cause, and gradients of another cause."""
    norm = replace(
        FINDING, cause="it is exactly W = 2 times the right one", quantity="global norm", holds_with=("one rank",)
    )
    update = replace(norm, law="global-norm.update", cause="")
    gradient = replace(
        FINDING,
        law="training.plain",
        cause="the gradient is exactly W = 2 times the right one: added up",
        quantity="gradient",
    )
    rounded = replace(gradient, law="rounding.gradients", quantity="", holds_with=("one rank",))
    assert len(grouped([norm, update, gradient])) == 2
    (whole,) = grouped([norm, update, gradient, rounded])
    assert {*map(id, whole)} == {*map(id, (norm, update, gradient, rounded))}
    assert len(grouped([norm, update, gradient, rounded, replace(FINDING, cause="another")])) == 2


@pytest.mark.parametrize("cause", ["the gradient is exactly N = 2 times the right one", "rows are not merged"])
def test_a_finding_without_a_cause_makes_none_of_two_causes(cause: str) -> None:
    norm = replace(FINDING, cause="it is exactly W = 2 times the right one", holds_with=("one rank",))
    other = replace(FINDING, law="training.plain", cause=cause, holds_with=("one rank",))
    between = replace(FINDING, law="training.evaluation", holds_with=("one rank",))
    assert grouped([norm, other, between]) == [[norm, between], [other]]


def test_a_group_of_two_causes_takes_in_one_that_has_one_of_them() -> None:
    """Replicas that are summed: R times too large, and where all ranks are replicas, W times."""
    by_ranks = replace(FINDING, cause="exactly W = 2 times the right one", holds_with=("one rank",))
    between = replace(FINDING, law="training.evaluation", holds_with=("one rank",))
    by_replicas = replace(FINDING, law="lifecycle.interrupted", cause="exactly R = 2 times the right one")
    turned = replace(by_replicas, law="features.compiled", holds_with=("one rank",), quantity="gradient")
    found = [by_ranks, by_replicas, between, turned, by_replicas]
    assert [len(group) for group in grouped(found[:3])] == [2, 1]
    (whole,) = grouped(found)
    assert len(whole) == 5


def test_a_finding_with_a_cause_joins_none_of_another_cause_by_way_of_one_without() -> None:
    """Two mistakes that the same changes turn, and between them what may be of either."""
    shifted = replace(ONE_BATCH, law="clipping.norms", cause="patches are shifted")
    between = replace(ONE_BATCH, law="clipping.sum")
    merged = replace(ONE_BATCH, law="clipping.factors", cause="rows are not merged")
    again = replace(merged, law="norms.sum")
    assert same(between, merged)
    assert grouped([shifted, between, merged, again]) == [[shifted, between], [merged, again]]


def test_what_says_most_speaks_for_its_root() -> None:
    of_runs = replace(FINDING, law="invariance.world", cause="W = 2 times", lines="a.py:3")
    without_lines = replace(FINDING, law="training.plain", cause="W = 3 times")
    with_lines = replace(without_lines, law="training.gradients", stage="right until then\nwrong within a.py:3")
    assert grouped([of_runs, without_lines, with_lines]) == [[with_lines, without_lines, of_runs]]
    longer = replace(without_lines, law="training.evaluation", words="a longer case")
    assert grouped([longer, without_lines]) == [[without_lines, longer]]
