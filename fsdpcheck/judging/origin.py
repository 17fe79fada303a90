"""Where what is wrong in a finding comes from, of several cases that fail alike: see ``where_seen``.

Each case is judged once more, with the numbers noted that pass through the implementation. What is looked for is the
first wrong quantity of a step; where that is not known, the number that the law says is wrong. Never part of a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import first_wrong, where_seen
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import called, judge
from fsdpcheck.judging.run import Ran, Run
from fsdpcheck.judging.where_seen import Trail

_CASES: Final = 3
"""Most cases that are looked at: the one shown, and of the others those most like it, the shortest to describe."""
_PART: Final = "the part of one module or parameter"


def of_cases(law: Law, run: Run, failing: Sequence[Case]) -> str:
    """In lines, for a finding; "" for nothing. ``failing``: cases that break the law alike, the one shown first."""
    found: list[Mapping[str, Trail]] = []
    unlike = partial(_unlike, failing[0])
    others = sorted(failing[1:], key=lambda case: (unlike(case), len(case.describe())))
    for number, case in enumerate((*failing[:1], *others[: _CASES - 1])):
        violation, execution = _judged(law, run, case)
        if violation is None or execution is None:
            continue
        if execution.failure is not None:
            if number == 0:
                return _raised(execution)
            continue
        found.append(_trails(run, case, violation, execution))
    return _told(found)


def _unlike(shown: Case, other: Case) -> tuple[bool, ...]:
    """Whether there are other ranks or micro-batches. Of several each has a part of a number alone, and what is wrong
    is seen behind a sum."""
    if not isinstance(shown, TrainingCase) or not isinstance(other, TrainingCase):
        return ()
    ranks, micro = other.world_size != shown.world_size, other.step.micro_batches != shown.step.micro_batches
    return ranks, micro


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
            return where_seen.of_raised(result.raised)
    return ""


def _trails(run: Run, case: Case, violation: Violation, execution: Execution) -> Mapping[str, Trail]:
    """By part of what is wrong; of parts that modules and parameters have, if there is but one."""
    found: dict[str, Trail] = {}
    if isinstance(case, TrainingCase) and not violation.despite:
        noting = replace(run, values=True, ran=Ran(), recalls=False)
        with suppress(Exception):
            found = dict(called(case, first_wrong.first_wrong, noting, case, execution.request).trails)
    if not found and (sought := where_seen.of_violation(violation)) is not None:
        seen = where_seen.trail(execution, sought)
        return {} if seen is None else {"": seen}
    parts = [part for part in found if part not in ("", first_wrong.WEIGHT)]
    whole = {part: seen for part, seen in found.items() if part not in parts}
    inner = [part for part in parts if not any(other.startswith(f"{part}.") for other in parts)]
    return {**whole, _PART: found[inner[0]]} if len(inner) == 1 else whole


def _told(found: Sequence[Mapping[str, Trail]]) -> str:
    """What the cases have in common: of the part, if one is known, and else of the whole."""
    common = {
        part: where_seen.common([trails[part] for trails in found if part in trails])
        for part in (_PART, first_wrong.WEIGHT, "")
    }
    for part in (_PART, first_wrong.WEIGHT):
        trail = common[part]
        if trail is not None and trail.wrong:
            return f"{part}:\n{where_seen.in_words(trail)}"
    trail = common[""]
    return "" if trail is None else where_seen.in_words(trail)
