"""What two runs of a script have printed, compared line by line, without what no two runs have in common."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

_VARYING: Final = re.compile(
    r"0x[0-9a-f]+|script-\w+|\[\d{3,}\]|'MASTER_PORT': '\d+'|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}"
    r"|\d+/\d+/\d+ \d+:\d+:\d+ [AP]M|\d{4}-?\d\d-?\d\d[-T ][\d:.,]+|\"time\": \d+"
    r"|(Time|Data|Rate):? *[\d.]+(s,\s+[\d.]+/s)?\s*\([^)]*\)|[\d.]+ ?(ms|seconds|GBps|img per sec)\b"
    r"|speed: [\d.]+|Elapsed time: [\d:]+"
)
"""What no two runs have in common: addresses, temporary folders, numbers of processes and ports, times, speeds."""


def equal_lines(one: str, other: str) -> tuple[int, int]:
    """How many lines both have printed, in whatever order, and how many there are."""
    mine, theirs = _lines_of(one), _lines_of(other)
    return (mine & theirs).total(), max(mine.total(), theirs.total())


def differing(one: str, other: str) -> list[list[str]]:
    """The first lines that only one of the two has printed, or has printed more often."""
    mine, theirs = _lines_of(one), _lines_of(other)
    return [[line[:200] for line in sorted(only.elements())[:8]] for only in (mine - theirs, theirs - mine)]


def error(ending: str) -> str:
    """The line of an exception that ended a program, as Python prints it."""
    found = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception): .*", ending, re.MULTILINE)
    return found[0] if found else ""


def _lines_of(text: str) -> Counter[str]:
    return Counter(_VARYING.sub("#", line.strip()) for line in text.splitlines() if line.strip())
