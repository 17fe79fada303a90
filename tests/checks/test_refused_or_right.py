"""The checks of what may be refused: a refusal counts only if it is one, and a cause only if nothing else is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdpcheck import oracle
from fsdpcheck.case import LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.checks import refused_or_right
from fsdpcheck.checks.refused_or_right import THAWED, TIED_APART, USES, Doubtful, assert_refused_or_trained
from fsdpcheck.execution import Execution, Failure
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from tests.common.fabricated import SMALL, execution
from tests.common.tables import each

FROZEN = replace(SMALL.model, layers=(replace(SMALL.model.layers[0], frozen="all"), SMALL.model.layers[1]))
CASE = replace(SMALL, model=FROZEN, step=replace(SMALL.step, thaws=True))
WHAT = Doubtful(THAWED.without, "the cause")


def right(case: TrainingCase) -> tuple[Execution, Answer]:
    answer = oracle.answer(case)
    return execution(answer), answer


def wrong(case: TrainingCase) -> tuple[Execution, Answer]:
    """Nothing of the first layer is updated, behind the first step."""
    found, answer = right(case)
    for rank in found.ranks:
        name = next(iter(rank.steps[1].params))
        rank.steps[1].params[name] = answer.steps[1].before[name] + 0.5
    return found, answer


def raises(case: TrainingCase) -> tuple[Execution, Answer]:
    found, answer = right(case)
    return replace(found, ranks=[], failure=Failure("raised", "report", ())), answer


def run(thawed: Callable[..., tuple[Execution, Answer]], frozen: Callable[..., tuple[Execution, Answer]] = right):  # type: ignore[no-untyped-def]
    """An implementation that does the one where a case thaws, and the other where it does not."""
    return lambda case: thawed(case) if case.step.thaws else frozen(case)


def test_what_is_right_and_what_is_refused_hold() -> None:
    for thawed in (right, raises):
        assert_refused_or_trained(run(thawed), CASE, WHAT)


def test_what_is_raised_anyway_refuses_nothing() -> None:
    with pytest.raises(Violation, match="did not complete"):
        assert_refused_or_trained(run(raises, raises), CASE, WHAT)


@each(("frozen", "cause"), [(right, "the cause"), (wrong, ""), (raises, "")])
def test_what_may_be_refused_is_the_cause_only_where_all_is_right_without_it(
    frozen: Callable[..., tuple[Execution, Answer]], cause: str
) -> None:
    with pytest.raises(Violation, match="the parameters are not the single device's") as found:
        assert_refused_or_trained(run(wrong, frozen), CASE, WHAT)
    assert found.value.cause == cause


def test_each_case_is_had_without_what_may_be_refused() -> None:
    layers = (LayerSpec(2), LayerSpec(2), LayerSpec(2, used="for all"))
    case = TrainingCase(ModelSpec(layers, features=2, tied=(0, 1), units=(1, 1, 1)))
    assert "tied-apart" in case.requires()
    assert "tied-apart" not in TIED_APART.without(case).requires()
    assert "one-row" in case.requires()
    assert "one-row" not in USES.without(case).requires()
    assert CASE.requires() - THAWED.without(CASE).requires() == {"thawed"}
    again = replace(CASE, step=replace(CASE.step, steps=3, refreezes=True))
    assert again.requires() - THAWED.without(again).requires() == {"thawed", "frozen-again"}
    assert refused_or_right.USES.cause == ""
