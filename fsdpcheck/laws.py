"""What a law of one's own needs, in one place that stays: ``from fsdpcheck.laws import PLAIN, law``.

A law is a function ``body(case, run)`` that returns or raises ``Violation``; ``run(case)`` gives an ``Execution``. Its
space says which cases it is about and what must occur among them::

    @law("mine.trains", promise="plain", space=PLAIN.without("tied").but(ranks=2, must_occur=("several units",)))
    def test_it_trains(case: TrainingCase, run: Run) -> None:
        '''Every rank comes to the end of every step.'''
        assert run(case).failure is None

Other spaces: ``CaseSpace(...)``, and ``BuiltSpace(build=...)`` for cases that no field of it describes.
"""

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters, law
from fsdpcheck.judging.run import Run
from fsdpcheck.program.probe import Notes, Probe, probe
from fsdpcheck.strategies import (
    EQUAL_BITS,
    GLOBAL_NORM,
    PLAIN,
    PRIVATE,
    PRIVATE_EXACT,
    PRIVATE_PROBE,
    PRIVATE_UNCLIPPED,
    REAL,
    REAL_PRIVATE,
    BuiltSpace,
    CaseSpace,
    Family,
)

__all__ = [
    "EQUAL_BITS", "GLOBAL_NORM", "PLAIN", "PRIVATE", "PRIVATE_EXACT", "PRIVATE_PROBE", "PRIVATE_UNCLIPPED", "REAL",
    "REAL_PRIVATE", "BuiltSpace", "Case", "CaseSpace", "Execution", "Family", "Law", "Notes", "Probe", "Run",
    "TrainingCase", "Violation", "chapters", "check_law", "law", "probe",
]  # fmt: skip
