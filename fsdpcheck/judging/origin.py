"""Where what is wrong in a finding comes from, of several cases that fail alike: see ``value_trail``.

Each case is judged once more, with the numbers noted that pass through the implementation. What is looked for is the
first wrong quantity of a step; where that is not known, the number that the law says is wrong. Never part of a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import first_wrong, value_trail
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import called, judge
from fsdpcheck.judging.run import Ran, Run
from fsdpcheck.judging.value_trail import Trail
from fsdpcheck.program import NO_VALUE

_CASES: Final = 3
"""Most cases that are looked at: the one shown, and of the others those of as many ranks, the shortest to describe."""
_UNFILLED: Final = (
    f"{NO_VALUE} is what every parameter holds before a checkpoint is read: nothing was read into this one"
)
_PART: Final = "the part of one module or parameter"


def of_cases(law: Law, run: Run, failing: Sequence[Case]) -> str:
    """In lines, for a finding; "" for nothing. ``failing``: cases that break the law alike, the one shown first."""
    found: list[Mapping[str, Trail]] = []
    unread = ""
    others = sorted(failing[1:], key=lambda case: (_ranks(case) != _ranks(failing[0]), len(case.describe())))
    for number, case in enumerate((*failing[:1], *others[: _CASES - 1])):
        violation, execution = _judged(law, run, case)
        if violation is None or execution is None:
            continue
        if number == 0 and _is_unfilled(violation):
            return _UNFILLED
        if execution.failure is not None:
            if number == 0:
                return _raised(execution)
            continue
        if number == 0:
            unread = _unread(violation, execution)
        found.append(_trails(run, case, violation, execution))
    if found and first_wrong.WEIGHT in found[0] and _wrong(found, first_wrong.WEIGHT) is None:
        found += _weights(law, run, others[_CASES - 1 :][:_CASES])
    return "\n".join(filter(None, (_told(found), unread)))


def _weights(law: Law, run: Run, cases: Sequence[Case]) -> Iterator[Mapping[str, Trail]]:
    """Of further cases what a gradient is multiplied by alone: a number such as 1/2 tells something where others have
    another one, and it is whole on each rank."""
    for case in cases:
        violation, execution = _judged(law, run, case)
        if violation is not None and execution is not None and execution.failure is None:
            trails = _trails(run, case, violation, execution)
            yield {part: trail for part, trail in trails.items() if part == first_wrong.WEIGHT}


def _common(found: Sequence[Mapping[str, Trail]], part: str) -> Trail | None:
    """What the cases that have the part have in common."""
    return value_trail.common([trails[part] for trails in found if part in trails])


def _wrong(found: Sequence[Mapping[str, Trail]], part: str) -> Trail | None:
    """The same, where that says where it is wrong first."""
    trail = _common(found, part)
    return trail if trail is not None and trail.wrong else None


def _ranks(case: Case) -> int:
    """Where there are several, a rank may have a part of a number alone, and what is wrong is seen behind a sum."""
    return case.mesh.world_size if isinstance(case, TrainingCase) else 1


def _judged(law: Law, run: Run, case: Case) -> tuple[Violation | None, Execution | None]:
    ran = Ran()
    with suppress(Exception):
        try:
            judge(law, case, replace(run, values=True, ran=ran, recalls=False))
        except Violation as violation:
            return violation, ran.newest
    return None, None


def _raised(execution: Execution) -> str:
    """Of the first rank that raised what the run failed by."""
    failure = execution.failure
    assert failure is not None
    for result in execution.ranks:
        if result.raised is not None and result.raised.type == failure.exception.rpartition(".")[2]:
            return value_trail.of_raised(result.raised)
    return ""


def _unread(violation: Violation, execution: Execution) -> str:
    """What was not looked at on the rank that the violation names, if it names one."""
    sought = value_trail.of_violation(violation)
    rank = sought.rank if sought is not None else 0
    return value_trail.of_unread(execution.ranks[rank].unread) if rank < len(execution.ranks) else ""


def _is_unfilled(violation: Violation) -> bool:
    """Whether what was got is no value of the implementation: parameters hold it before a checkpoint is read."""
    got = violation.got.partition(" within ")[0]
    return got in (str(NO_VALUE), str(torch.tensor(NO_VALUE).item()))


def _trails(run: Run, case: Case, violation: Violation, execution: Execution) -> Mapping[str, Trail]:
    """By part of what is wrong; of parts that modules and parameters have, if there is but one."""
    found: dict[str, Trail] = {}
    if isinstance(case, TrainingCase) and not violation.despite:
        noting = replace(run, values=True, ran=Ran(), recalls=False)
        with suppress(Exception):
            found = dict(called(case, first_wrong.first_wrong, noting, case, execution.request).trails)
    if not found and (sought := value_trail.of_violation(violation)) is not None:
        seen = value_trail.trail(execution, sought)
        return {} if seen is None else {"": seen}
    parts = [part for part in found if part not in ("", first_wrong.WEIGHT)]
    whole = {part: seen for part, seen in found.items() if part not in parts}
    inner = [part for part in parts if not any(other.startswith(f"{part}.") for other in parts)]
    return {**whole, _PART: found[inner[0]]} if len(inner) == 1 else whole


def _told(found: Sequence[Mapping[str, Trail]]) -> str:
    """What the cases have in common: of the part, if one is known, and else of the whole."""
    for part in (_PART, first_wrong.WEIGHT):
        if (trail := _wrong(found, part)) is not None:
            return f"{part}:\n{value_trail.in_words(trail)}"
    whole = _common(found, "")
    return "" if whole is None else value_trail.in_words(whole)
