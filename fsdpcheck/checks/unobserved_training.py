"""Check of a training that nobody looks at before its end: to show something must change nothing of what is trained.

A method that mends what it shows - averages parameters that have drifted apart, loads what it saved - would mend every
step that is looked at, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdpcheck import diagnosis
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import require_equal
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer

_WHAT = "the training is right only where it is shown after every step"
_CAUSE = "what shows parameters or gradients also changes what is trained"


def looked_at_late(case: TrainingCase) -> bool:
    """Whether a case is one of those that are looked at after their last step alone: half of those of several steps."""
    return case.step.steps > 1 and case.seed % 2 == 1


def assert_trained(take: Callable[[bool], Execution], answer: Answer) -> None:
    """Every rank's parameters are the single device's, bit for bit, after every step or, in some cases, the last alone.

    ``take(late)`` runs the case. Where a training that was looked at late is wrong it is taken again and looked at
    after every step, which says what is wrong; if nothing is then, the training depends on being looked at.
    """
    if not looked_at_late(answer.case):
        assert_parameters_equal(take(False), answer)
        return
    try:
        assert_last_equal(take(True), answer)
    except Violation as unseen:
        assert_parameters_equal(take(False), answer)
        place = f"{unseen.where}; shown at no step before"
        raise Violation(_WHAT, got=unseen.got, wanted=unseen.wanted, where=place, cause=_CAUSE) from unseen


def assert_last_equal(execution: Execution, answer: Answer) -> None:
    """After the last step every rank shows the single device's parameters, bit for bit."""
    last = len(answer.steps) - 1
    for result in completed(execution):
        got = result.steps[last].params
        cause = partial(diagnosis.of_update, answer, last, got)
        what = "the parameters are not the single device's"
        require_equal(what, got, answer.steps[last].after, f"step {last}, rank {result.rank}", cause)
