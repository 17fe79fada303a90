"""Test the tester: every planted fault is caught by a law that is said to catch it, and every law catches one.

By day each runs its witness, one case kept as a token in tests/witnesses.json; a witness that kills no more is the
failure. The nightly tier searches as ``run`` does, and so shows that the cases that are drawn reach the fault.
Without a fault the same laws hold on the same cases (properties/), so what breaks them here is the fault.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.impl import faults
from fsdpcheck.impl.faults._fault import Fault
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

_NAMED_ALONE = {fault.caught_by for fault in faults.ALL.values()} & chapters().keys()
"""Laws that a fault names and no others: its own test asks that they catch it."""
_NAMES = [*faults.ALL, *(name for name in chapters() if name not in _NAMED_ALONE)]
"""Faults that a law must catch, and laws that must catch one of the faults that name them among others."""
_LONG = {
    *("vanishing_factors_are_one", "factors_have_a_floor", "large_draws_cut_off"),
    *("gradient_doubled_by_compilation",),
}
"""Those whose law takes many seconds a case, and is itself judged by night and in the main job."""


@functools.cache
def witnesses() -> dict[str, str]:
    """Name of a fault or law -> token of a case in which the one kills the other."""
    path = Path(__file__).parents[1] / "witnesses.json"
    kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def pairs(name: str) -> list[tuple[Law, Fault]]:
    """The pairs of law and fault of which one must end in a kill."""
    if name in faults.ALL:
        fault = faults.ALL[name]
        return [(law, fault) for law in chapters().values() if fnmatch(law.name, fault.caught_by)]
    return [(chapters()[name], fault) for fault in faults.ALL.values() if fnmatch(name, fault.caught_by)]


def killed(verdict: Verdict) -> bool:
    """Whether the law breaks by what the fault does; planted code that merely raises proves nothing."""
    assert verdict.status in ("holds", "finding"), verdict.reason
    return verdict.finding is not None and verdict.finding.kind != "raised"


def planted(law: Law, fault: Fault, engine: Engine) -> Run:
    """On simulated ranks, ``engine``, where the law is asked there."""
    engine = _real_ranks() if law.on_real_ranks else engine
    return Run(engine, fault.subject, installs=(installed(fault),))


@functools.cache
def _real_ranks() -> Engine:
    engine = ProcessesEngine()
    atexit.register(engine.close)
    return engine


def installed(fault: Fault) -> str:
    return f"fsdpcheck.impl.faults:{fault.name}"


def needs_triton(law: Law) -> None:
    if law.promise == "kernels" and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (Linux): pip install 'fsdpcheck[kernels]'")


def _by_day_or_night(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.nightly] * (name in _LONG))


@pytest.mark.parametrize("name", [_by_day_or_night(name) for name in _NAMES])
def test_the_witness_kills(name: str, engine: SimulatedEngine) -> None:
    assert name in witnesses(), f"{name} has no witness; next: python -m benchmarks witnesses {name}"
    token = decode(witnesses()[name])
    law, fault = next(
        pair for pair in pairs(name) if (pair[0].name, installed(pair[1])) == (token.law, *token.installs)
    )
    needs_triton(law)
    assert token.adapter == fault.subject
    assert killed(check_case(law, planted(law, fault, engine), token.case, diagnose=False))


def test_there_is_no_witness_of_what_is_gone() -> None:
    assert set(witnesses()) == set(_NAMES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", _NAMES)
def test_drawn_cases_kill(name: str, engine: SimulatedEngine) -> None:
    assert pairs(name), f"no law is named by the fault {name}, or no fault is said to be caught by the law {name}"
    for law, fault in pairs(name):
        needs_triton(law)
        if killed(check_law(law, planted(law, fault, engine), "ci", shrink=False)):
            return
    pytest.fail(f"no drawn case of {', '.join(law.name for law, _ in pairs(name))} kills {name}")
