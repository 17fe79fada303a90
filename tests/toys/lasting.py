"""A law that a small batch breaks, and one whose ranks run case after case for ever: named by ``--laws lasting.py``."""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from tests.toys.laws import SPACE


@law("lasting.first", promise="plain", space=SPACE)
def first(case: TrainingCase, run: Run) -> None:
    """No batch is larger than three samples."""
    if case.layout.batch_size > 3:
        got = str(case.layout.batch_size)
        raise Violation("the batch is too large", got=got, wanted="at most 3", where="the layout", cause="its size")


@law("lasting.then", promise="plain", space=SPACE)
def then(case: TrainingCase, run: Run) -> None:
    """Runs until somebody ends the session."""
    while True:
        run(case)
