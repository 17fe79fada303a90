"""Study: is the cause that a finding names the right one? Over every planted fault; each says what would be right.

Two controls say what that is worth. Do the patterns of right causes tell faults apart: how many of them fit the cause
named for another fault? And with the causes that are right taken away, as if the mistake were one that nobody has
thought of: is nothing named, or a wrong cause?
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.cause import Causes, common, named
from fsdpcheck.findings.verdict import Finding
from fsdpcheck.impl import faults
from fsdpcheck.impl.faults._fault import Fault
from fsdpcheck.judging import attribution, check, registry
from fsdpcheck.judging.run import Run

_Told = list[Causes | None]
_OR = " or "  # between two causes, of which one is right at most


@dataclass(frozen=True)
class Diagnosed:
    """One fault and what was said of it; ``finding`` is None when no law caught it, or the planted code raised."""

    fault: Fault
    finding: Finding | None
    held_out: str
    """What is named without the causes that are right."""

    @property
    def word(self) -> str:
        """ "right", "half" (one of two causes named), "wrong", "silent" or "missed"."""
        return "missed" if self.finding is None else judged(self.fault, self.finding.cause)

    def lines(self) -> Iterator[str]:
        """The finding in a few lines."""
        if self.finding is None:
            yield f"missed  {self.fault.name}: not caught, or the planted code raised"
            return
        found = self.finding
        yield f"{self.word:<7} {self.fault.name}, {found.law}: {found.cause or '-'}"
        more = {"stage": found.stage, "when": found.when, "without the right cause": self.held_out}
        yield from (f"          {name}: {text}" for name, text in more.items() if text)


def reports(seed: int = 0, pattern: str = "*") -> Iterator[str]:
    """What is said of each fault whose name matches (fnmatch), then the totals; ``seed`` draws other cases.

    Those that show on real ranks alone are left out.
    """
    found = []
    engine = SimulatedEngine()
    unseen = {name for name, law in registry.chapters().items() if law.on_real_ranks}
    try:
        for fault in faults.ALL.values():
            if fnmatch.fnmatchcase(fault.name, pattern) and fault.caught_by not in unseen:
                found.append(_one(engine, fault, seed))
                yield from found[-1].lines()
    finally:
        engine.close()
    yield from totals(found)


def judged(fault: Fault, cause: str) -> str:
    """ "right", "half" where one of two named causes is right, "wrong", or "silent"."""
    if not cause:
        return "silent"
    right = [bool(re.search(fault.cause, each)) for each in cause.split(_OR)]
    return "right" if all(right) else "half" if any(right) else "wrong"


def totals(found: Sequence[Diagnosed]) -> Iterator[str]:
    """Counts, the two shares, and the two controls. A cause that is one of two counts as named, and as wrong."""
    count = {word: sum(each.word == word for each in found) for word in ("right", "half", "wrong", "silent", "missed")}
    said = count["right"] + count["half"] + count["wrong"]
    yield f"{len(found)} faults: {', '.join(f'{number} {word}' for word, number in count.items())}"
    yield f"right, of those named: {_share(count['right'], said)} (asked: >= 95 %)"
    yield f"named, of all: {_share(said, len(found))} (asked: >= 60 %)"
    yield from _by_chapter(found)
    causes = [(each.fault, each.finding.cause) for each in found if each.finding is not None and each.finding.cause]
    foreign = [(fault, cause) for fault in (each.fault for each in found) for owner, cause in causes
               if owner.cause != fault.cause and re.search(fault.cause, cause)]  # fmt: skip
    pairs = sum(owner.cause != each.fault.cause for each in found for owner, _ in causes)
    yield f"control: the pattern of a fault fits the cause named for another one: {len(foreign)} of {pairs} pairs"
    wrong = sum(bool(each.held_out) for each in found)
    yield f"control: without the right cause a cause is named, wrongly, in {wrong} of {len(found)}"


def _by_chapter(found: Sequence[Diagnosed]) -> Iterator[str]:
    """The same counts for each chapter of laws, by the law that each fault names."""
    by_chapter: dict[str, Counter[str]] = {}
    for each in found:
        by_chapter.setdefault(each.fault.caught_by.partition(".")[0], Counter())[each.word] += 1
    for chapter, count in sorted(by_chapter.items()):
        yield f"  {chapter}: {', '.join(f'{number} {word}' for word, number in count.items())}"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} = {100 * part / whole:.1f} %" if whole else "none"


def _one(engine: SimulatedEngine, fault: Fault, seed: int) -> Diagnosed:
    with _listening() as told:
        finding = _found(engine, fault, seed)
    return Diagnosed(fault, finding, "" if finding is None else _held_out(fault, told))


def _found(engine: SimulatedEngine, fault: Fault, seed: int) -> Finding | None:
    """What the first law says that has to catch the fault and does."""
    run = Run(engine, fault.subject, installs=(f"fsdpcheck.impl.faults:{fault.name}",))
    for name, chosen in registry.chapters().items():
        if fnmatch.fnmatchcase(name, fault.caught_by):
            found = check.check_law(chosen, run, "ci", seed=seed).finding
            if found is not None and found.kind != "raised":
                return found
    return None


@contextmanager
def _listening() -> Iterator[_Told]:
    """All causes that the newest finding's cause was chosen from, the minimal case's first."""
    told: _Told = []
    original = attribution.Evidence.cause

    def cause(self: attribution.Evidence, minimal: Causes | None) -> str:
        told[:] = [minimal, *self.causes]
        return original(self, minimal)

    attribution.Evidence.cause = cause  # type: ignore[method-assign]
    try:
        yield told
    finally:
        attribution.Evidence.cause = original  # type: ignore[method-assign]


def _held_out(fault: Fault, told: _Told) -> str:
    """What would be named if the right causes did not exist."""
    right = {each.key for own in told for each in own or () if re.search(fault.cause, each.text)}
    first, *others = [None if own is None else [s for s in own if s.key not in right] for own in told] or [None]
    return named(common(first, others))
