"""Roots: which findings are one defect, seen by several laws or in several cases. Plain data, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from fsdpcheck.findings.verdict import Finding

_OF_VALUES: Final = ("value", "undetermined")
_LONGEST: Final = 300
"""Characters of what is written down of a finding."""
_NUMBER: Final = re.compile(r"\d[\d.e+-]*")
_LAYERS: Final = re.compile(r" \([^()]*\)$")
_FACTOR: Final = re.compile(r"exactly (\S+) = # times the right")
_COUNTS: Final = re.compile("[WRS]")
"""Of ranks: all, of replicas, of shards. In a case in which they are as many the first is named."""
OTHER_NUMBERS: Final = "other numbers"
"""What the change of a case's seed is called: it says something of values, nothing of structure."""
OF_NORMS: Final = "clipped by factors from wrong norms: "
"""What a cause begins with that tells why norms are wrong, where it is seen in what was clipped by them."""


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings by root, in the order their roots were found; one that is like findings of two groups makes them one.

    Unless each of the two has a cause that the other has not: then it is with the first of them. One with a cause is in
    no group of other causes, like whom of them it may be.

    The first of a group speaks for it: one that compares with the single device before one that compares two runs of
    the implementation, then one that names lines of its code, then one with a cause, then that of the plainest case.
    """
    groups: list[list[Finding]] = []
    for finding in findings:
        own = _causes([finding])
        homes = [group for group in groups if any(same(finding, other) for other in group)]
        homes = [group for group in homes if _one_cause(own, _causes(group))]
        if not homes:
            groups.append([finding])
            continue
        first, *others = homes
        others = [group for group in others if _one_cause(_causes(first), _causes(group))]
        first += [*(one for group in others for one in group), finding]
        groups = [group for group in groups if not any(group is other for other in others)]
    return [sorted(group, key=_silence) for group in groups]


def _one_cause(mine: set[str], theirs: set[str]) -> bool:
    """Whether one of the two has no cause that the other has not."""
    return mine <= theirs or theirs <= mine


def _causes(group: Iterable[Finding]) -> set[str]:
    """What is too large by one factor is of one cause, norms and gradients alike; ranks are counted in several ways."""
    causes = {_defect(finding.cause) for finding in group if finding.cause}
    return {_COUNTS.sub("W", factor[1]) if (factor := _FACTOR.search(cause)) else cause for cause in causes}


def same(one: Finding, other: Finding) -> bool:
    """Whether both are probably one defect.

    Failures are, that happen at one line. Wrong values are, of one cause, wrong norms and what is clipped by them among
    them; where one of them has none, if the first wrong quantity is the same at the same line, and the same single
    changes of their cases make them hold.
    """
    if (one.adapter, one.kind) != (other.adapter, other.kind):
        return False
    if one.kind not in _OF_VALUES:
        return (one.place or one.got) == (other.place or other.got)
    if one.cause and other.cause:
        return _defect(one.cause) == _defect(other.cause)
    if one.law == other.law and _located(one) != _located(other):
        return False  # a further finding of one law is none that fails like the first
    if not _located(one) or not _located(other):
        return (one.cause or one.what) == (other.cause or other.what)
    if _differ(one.quantity, other.quantity) or _differ(one.place, other.place):
        return False
    return _turned_alike(one, other)


def words(finding: Finding) -> str:
    """How a finding fails, in a line: what is written down of it to know it again, by whoever lives with it.

    Of a failure its kind and its first line. Of a wrong value the cause, with # for each number; where there is none,
    what is wrong, with the values themselves where they are exact and so the same on every machine.
    """
    if finding.kind not in _OF_VALUES:
        said = _NUMBER.sub("#", finding.got.partition("\n")[0])
    elif finding.cause:
        said = _NUMBER.sub("#", finding.cause)
    else:
        said = finding.what
        if finding.case.get("arithmetic", {}).get("numbers") == "grid":
            said += f": got {finding.got}, wanted {finding.wanted}"
    return f"{finding.kind}: {' '.join(said.split())[:_LONGEST]}"


def _silence(finding: Finding) -> tuple[bool, bool, bool, int]:
    lines = finding.place or finding.lines or "\n" in finding.stage
    return finding.law.startswith("invariance."), not lines, not finding.cause, len(finding.words)


def _defect(cause: str) -> str:
    """The mistake, without numbers and without the layers that it is seen in, which are named behind it."""
    return _NUMBER.sub("#", _LAYERS.sub("", cause.removeprefix(OF_NORMS)))


def _located(finding: Finding) -> bool:
    return bool(finding.quantity or finding.holds_with)


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)


def _turned_alike(one: Finding, other: Finding) -> bool:
    """Whether each change that was tried in both cases did the same, and one makes both hold.

    Where none makes either hold, as of two mistakes in one case, the first wrong quantity must be known. What other
    numbers do says nothing: they may let a rare thing happen, or keep it away.
    """
    holds, breaks, others_hold = (
        {*words} - {OTHER_NUMBERS} for words in (one.holds_with, one.breaks_with, other.holds_with)
    )
    if holds & {*other.breaks_with} or breaks & others_hold:
        return False
    if not holds and not others_hold:
        return bool(one.quantity and other.quantity)
    return bool(holds & others_hold)
