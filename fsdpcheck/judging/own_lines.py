"""Lines of an implementation that every failing case runs, and none that one change of the smallest makes hold.

Spectrum-based fault localisation (Jones, Harrold, Stasko: "Visualization of test information to assist fault
localization", ICSE 2002). Cases one change away leave few lines; further failing ones take away what the smallest runs
by chance, as where a size chooses between two right ways. Never part of a verdict. What is wrong in lines that others
run as well is not found so: then nothing is told, or first_wrong tells it.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from fsdpcheck.case import Case
from fsdpcheck.execution import Line
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import judge
from fsdpcheck.judging.run import Ran, Run

_HOLDING: Final = 4
"""Most cases that hold, of which lines are taken away."""
_FAILING: Final = 4
"""Most cases that fail, of which all must run a line."""
_FUNCTIONS: Final = 3
"""Most functions that are named; of more only the file is, if they are in one."""


def of_case(law: Law, run: Run, failing: Sequence[Case], holding: Sequence[Case]) -> str:
    """What all of ``failing`` run and none of ``holding``; "" for nothing.

    A function a line: "file:12-14, 18 in function: source of the first".

    ``failing``: cases that break the law, the smallest first. ``holding``: cases that are one change from that one.
    """
    if not holding:
        return ""
    once = _lines(law, run, holding[0])  # first, for what a process does once, such as to import
    own = _lines(law, run, failing[0]) - once
    for other in holding[1:_HOLDING]:
        own -= _lines(law, run, other) if own else set()
    for other in failing[1:_FAILING]:
        own &= _lines(law, run, other) if own else set()
    functions: dict[tuple[str, str], list[int]] = {}
    for file, number, function in sorted(own):
        functions.setdefault((file, function), []).append(number)
    files = {file for file, _ in functions}
    if len(functions) > _FUNCTIONS:
        return f"{len(functions)} functions of {files.pop()}" if len(files) == 1 else ""
    return "\n".join(_told(file, function, numbers) for (file, function), numbers in functions.items())


def _lines(law: Law, run: Run, case: Case) -> set[Line]:
    """What runs of the implementation when ``case`` is judged, whatever comes of that."""
    ran = Ran()
    with suppress(Exception):
        judge(law, case, replace(run, lines=True, ran=ran, recalls=False))
    return ran.lines


def _told(file: str, function: str, numbers: list[int]) -> str:
    source = linecache.getline(file, numbers[0]).partition("  # ")[0].strip()
    return f"{file}:{', '.join(_ranges(numbers))} in {function}" + (f": {source}" if source else "")


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Numbers in ascending order, those in a row as "first-last"."""
    first = last = numbers[0]
    for number in (*numbers[1:], None):
        if number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        first = last = number or 0
