"""Lines of an implementation that a failing case alone runs, and none of the cases that one change makes hold.

Spectrum-based fault localisation (Jones, Harrold, Stasko: "Visualization of test information to assist fault
localization", ICSE 2002), on cases that differ from the failing one in one thing. Never part of a verdict. What is
wrong in lines that all of them run is not found so: then nothing is told, or first_wrong tells it.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from fsdpcheck.case import Case
from fsdpcheck.execution import Line
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import judge
from fsdpcheck.judging.run import Ran, Run

_NEIGHBOURS: Final = 6
"""Most cases that hold of which lines are taken away."""
_FUNCTIONS: Final = 3
"""Most functions that are named; of more only the file is, if they are in one."""


def of_case(law: Law, run: Run, case: Case, holding: Collection[Case]) -> str:
    """Those of ``case``, a function a line: "file:12-14, 18 in function: source of the first"; "" for none.

    ``holding``: cases on which the law holds, each one change from ``case``.
    """
    if not holding:
        return ""
    others = [
        _lines(law, run, other) for other in [*holding][:_NEIGHBOURS]
    ]  # first: what a process does once is theirs
    own = _lines(law, run, case).difference(*others)
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
