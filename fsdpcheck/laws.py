"""All that an author of a law needs: ``from fsdpcheck.laws import law``.

A law is a function ``body(case, run)`` that returns or raises ``Violation``; ``run(case)`` gives an ``Execution``.
"""

from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters, law
from fsdpcheck.judging.run import Run
from fsdpcheck.program.probe import Notes, Probe, probe

__all__ = ["Execution", "Law", "Notes", "Probe", "Run", "Violation", "chapters", "check_law", "law", "probe"]
