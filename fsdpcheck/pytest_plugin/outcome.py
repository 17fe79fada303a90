"""What a verdict makes of a test."""

from __future__ import annotations

import sys

import pytest

from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report import colour, finding


def conclude(verdict: Verdict, required: bool = False) -> None:
    """Fail the running test with what breaks the law, or skip it where the law is not promised, unless it has to be."""
    __tracebackhide__ = True
    verdict = shown(verdict)
    if verdict.status in ("not promised", "not asked"):
        if required:
            pytest.fail(f"{verdict.law} is required, and {verdict.status}: {verdict.reason}", pytrace=False)
        pytest.skip(f"{verdict.status}: {verdict.reason}")
    if verdict.finding is not None:
        paint = colour.painter(sys.stdout)
        told = [finding.render([one], number, paint) for number, one in enumerate(verdict.findings, 1)]
        pytest.fail("\n\n".join(told), pytrace=False)
    if verdict.status != "holds":
        pytest.fail(finding.trouble(verdict), pytrace=False)
