"""What a finding says of its cause: by the case that it shows, and by others that failed alike."""

from __future__ import annotations

import pytest

from fsdpcheck.case import LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.attribution import Evidence
from fsdpcheck.judging.counterexample import Counterexample
from tests.common.sessions import finding

SMALLEST = TrainingCase(ModelSpec((LayerSpec(1),)))
ORDER = [Cause("order", "the same collectives in another order")]


def told(kind: str, own: Causes | None, others: list[Causes | None]) -> str:
    shown = Violation("the run did not complete", got="", wanted="", where="", cause=lambda: own)
    return (
        Counterexample(finding(kind=kind), [(SMALLEST, shown)], None, Evidence([(SMALLEST, other) for other in others]))
        .diagnosed()
        .cause
    )


@pytest.mark.parametrize("kind", ["deadlock", "mismatch", "value"])
def test_others_speak_for_a_case_that_cannot_tell(kind: str) -> None:
    assert told(kind, None, [ORDER, ORDER]) == ORDER[0].text
    assert told(kind, None, [None, None]) == ""


def test_ranks_that_come_apart_elsewhere_are_no_cause_of_what_was_raised_here() -> None:
    """Where one rank raises the others wait; in another case of the same mistake some call something else."""
    assert told("raised", None, [ORDER, ORDER]) == ""
    assert told("raised", ORDER, [ORDER, None]) == ORDER[0].text
