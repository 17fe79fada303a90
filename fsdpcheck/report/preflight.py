"""What a preflight answers: four questions, each by laws, and the findings behind a no."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings import roots
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.report import summary
from fsdpcheck.report.colour import Paint
from fsdpcheck.session.ledger import Ledger

ADAPTERS: Final = ("reference_fsdp2",)
"""What is asked where nobody says: torch's ``fully_shard``, with checkpoints and clipping of each sample over it."""
_HANGS: Final = frozenset({"deadlock", "mismatch", "unsafe"})
_VALUES: Final = frozenset({"value", "undetermined"})


@dataclass(frozen=True)
class Question:
    """``what``: what a yes says. ``laws`` judge it, and ``real`` those on a model with its own weights.

    ``whole``: the laws of them without which that is said in part alone; others are of what not everybody has.
    """

    what: str
    whole: tuple[str, ...]
    laws: tuple[str, ...]
    real: tuple[str, ...] = ()


QUESTIONS: Final = (
    Question(
        "no rank waits for ever for another", ("collectives.plain",), ("collectives.plain", "collectives.private")
    ),
    Question(
        "gradients and norms are the single device's",
        ("training.plain", "global-norm.returned"),
        (
            "training.gradients",
            "training.plain",
            "global-norm.returned",
            "clipping.norms",
            "training.private-gradients",
        ),
        ("rounding.gradients", "rounding.update", "rounding.private-gradients"),
    ),
    Question(
        "a checkpoint comes back, on other numbers of ranks too",
        ("state.resharded", "state.resumed"),
        ("state.resharded", "state.resumed"),
    ),
    Question("memory is what sharding promises", ("lifecycle.memory",), ("lifecycle.memory", "shards.cover")),
)


def laws(real: bool) -> tuple[str, ...]:
    """All laws that answer, in the order of the questions."""
    return tuple(law for one in QUESTIONS for law in (one.real or one.laws if real else one.laws))


def listed() -> str:
    """The questions, a line each, with their laws."""
    return "\n".join(f"  {one.what}: {', '.join(one.laws)}" for one in QUESTIONS)


def ending(ledger: Ledger, paint: Paint) -> str:
    """All that a preflight prints on stdout: what a session does, and the answers below it, where they are seen."""
    return "\n\n".join([summary.ending(ledger, paint), answers(shown(ledger), paint)])


def answers(ledger: Ledger, paint: Paint) -> str:
    """A line a question: yes, in part with what lacks, NO with its findings, or why neither."""
    numbers = {
        id(finding): number for number, group in enumerate(roots.grouped(ledger.findings), 1) for finding in group
    }
    lines = [_line(one, place, ledger, numbers, paint) for place, one in enumerate(QUESTIONS)]
    return "\n".join(["preflight:", *lines])


def _line(one: Question, place: int, ledger: Ledger, numbers: dict[int, int], paint: Paint) -> str:
    known = (*one.laws, *one.real)
    verdicts = [verdict for verdict in ledger.verdicts.values() if verdict.law in known]
    broken = sorted({numbers[id(finding)] for finding in _against(place, ledger) if id(finding) in numbers})
    if broken:
        which = ", ".join(map(str, broken))
        return paint(f"  NO           {one.what}: finding{'s' * (len(broken) > 1)} {which}", "red")
    open_ = list(_undecided(one, verdicts, ledger))
    held = [verdict for verdict in verdicts if verdict.status == "holds"]
    if held and not open_:
        cases = sum(verdict.cases for verdict in held)
        who = ", ".join(dict.fromkeys(verdict.adapter for verdict in held))
        if left := list(_left(one, held, ledger)):
            return paint(f"  in part      {one.what}: {cases} cases of {who}; {left[0]}", "yellow")
        return paint(f"  yes          {one.what}: {cases} cases of {who}", "green")
    why = open_ or [f"{verdict.adapter}: {verdict.reason}" for verdict in verdicts] or ["none of its laws was asked"]
    return paint(f"  not decided  {one.what}: {why[0]}", "yellow")


def _left(one: Question, held: Sequence[Verdict], ledger: Ledger) -> Iterator[str]:
    """What a yes would say beyond what was judged, of an adapter of which something holds."""
    if any(verdict.law in one.real for verdict in held):
        return
    for adapter in dict.fromkeys(verdict.adapter for verdict in held):
        for law in one.whole:
            verdict = ledger.verdicts.get((law, adapter))
            if verdict is None:
                yield f"nothing was asked by {law}"
            elif verdict.status != "holds":
                yield f"nothing is said by {law}: {verdict.reason or verdict.status}"


def _against(place: int, ledger: Ledger) -> Iterator[Finding]:
    """Findings that say no: of its laws; and a hang, whichever law met it, is one of the first question."""
    for finding in ledger.findings:
        if place == _answered(finding):
            yield finding


def _answered(finding: Finding) -> int:
    """The number of the question to which a finding says no."""
    if finding.kind in _HANGS:
        return 0
    places = (place for place, one in enumerate(QUESTIONS) if finding.law in (*one.laws, *one.real))
    place = next(places, 0)
    return 1 if place == 0 and finding.kind in _VALUES else place


def _undecided(one: Question, verdicts: Sequence[Verdict], ledger: Ledger) -> Iterator[str]:
    """What keeps it from being answered: a law that was judged to no end, or that nobody came to."""
    for verdict in verdicts:
        if verdict.status == "finding":
            yield f"{verdict.law} of {verdict.adapter} met what another question is about"
        elif verdict.status not in ("holds", "not promised", "not asked"):
            told = verdict.reason.splitlines()[0] if verdict.reason else verdict.status
            yield f"{verdict.law} of {verdict.adapter}: {told}"
    for law in ledger.laws:
        if law in (*one.laws, *one.real):
            for adapter in ledger.plan.adapters:
                if (law, adapter) not in ledger.verdicts:
                    yield f"{law} of {adapter}: not reached"
