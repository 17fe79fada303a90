"""Test the tester: every planted fault is caught by a law that is said to catch it, and every law catches one.

Without a fault the same laws hold on the same cases (properties/), so what breaks them here is the fault.
"""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatch

import pytest

from fsdpcheck.check import check_law
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl import faults
from fsdpcheck.impl.fault import Fault
from fsdpcheck.law import Law, chapters
from fsdpcheck.runner import Run


def catches(law: Law, fault: Fault, engine: SimulatedEngine) -> bool:
    """Whether the law breaks by what the fault does; planted code that merely raises proves nothing."""
    run = Run(engine, fault.subject, installs=(f"fsdpcheck.impl.faults:{fault.name}",))
    if law.promise == "kernels" and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (Linux): pip install 'fsdpcheck[kernels]'")
    verdict = check_law(law, run, "ci", shrink=False)
    assert verdict.status in ("holds", "finding"), verdict.reason
    return verdict.finding is not None and verdict.finding.kind != "raised"


@pytest.mark.parametrize("fault", faults.ALL.values(), ids=faults.ALL)
def test_a_named_law_catches_the_fault(fault: Fault, engine: SimulatedEngine) -> None:
    named = [law for name, law in chapters().items() if fnmatch(name, fault.caught_by)]
    assert named, f"no law is called {fault.caught_by!r}"
    assert any(catches(law, fault, engine) for law in named)


_NAMED_ALONE = {fault.caught_by for fault in faults.ALL.values()} & chapters().keys()
"""Laws of which the test above asks that they, and no others, catch a fault."""


@pytest.mark.parametrize("law", [law for name, law in chapters().items() if name not in _NAMED_ALONE])
def test_a_law_that_no_fault_names_alone_catches_one_that_names_several(law: Law, engine: SimulatedEngine) -> None:
    naming = [fault for fault in faults.ALL.values() if fnmatch(law.name, fault.caught_by)]
    assert naming, f"no fault is said to be caught by {law.name}"
    assert any(catches(law, fault, engine) for fault in naming)
