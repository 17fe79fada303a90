"""Chapters of a session: what became of the laws of each, adapter by adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from fsdpcheck.errors import INTERNAL, NO_PROGRESS, USAGE
from fsdpcheck.findings.roots import grouped
from fsdpcheck.session.ledger import INTERRUPTED, Ledger

NOT_REACHED: Final = "not reached"
BELOW: Final = ("not promised", "not asked")
"""Statuses that are neither a pass nor a failure."""
_ORDER: Final = (
    "finding", "error", "no case", "too few cases", "not supported", NOT_REACHED, "holds", *BELOW,
)  # fmt: skip
ALL_HOLDS: Final = "Every promised law holds"
_HEADLINES: Final = {
    USAGE: "Not all that was asked could be judged", INTERNAL: "The harness itself went wrong",
    NO_PROGRESS: "The session made no progress", INTERRUPTED: "The session was interrupted",
}  # fmt: skip
_SEVERAL: Final = {"finding": "findings", "error": "errors", "no case": "without a case", "holds": "hold"}
_MANY: Final = 28
"""Characters of an adapter's name in the head of a column; longer ones are cut to file and attribute."""


@dataclass(frozen=True)
class Chapter:
    """``laws`` in the order of the session; ``counts``: adapter -> status -> how many of them."""

    name: str
    laws: tuple[str, ...]
    counts: Mapping[str, Mapping[str, int]]
    cases: int
    seconds: float

    @property
    def asked(self) -> bool:
        """Whether some law of it was judged, or ought to have been, on some adapter."""
        return any(count and word not in BELOW for own in self.counts.values() for word, count in own.items())

    @property
    def bad(self) -> bool:
        """Whether something of it is neither a pass, nor left out by the adapter's own word."""
        quiet = {*BELOW, "holds"}
        return any(count and word not in quiet for own in self.counts.values() for word, count in own.items())


def headline(ledger: Ledger) -> str:
    """The verdict on the session in a few words: defects first, then what kept it from saying more.

    That all holds is said of a session that ended and judged something.
    """
    red = [finding for finding in ledger.findings if finding.token not in ledger.waived]
    roots, beside = len(grouped(red)), _beside(ledger)
    if roots:
        found = f"{roots} defect{'s' * (roots > 1)} found"
        return f"{found}; {beside[0].lower()}{beside[1:]}" if beside else found
    judged = any(verdict.status == "holds" for verdict in ledger.verdicts.values())
    holds = f"{ALL_HOLDS} but for what is waived" if ledger.waived else ALL_HOLDS
    return beside or (holds if judged else "Nothing was judged")


def _beside(ledger: Ledger) -> str:
    """What went wrong with the session itself; "" for nothing."""
    if ledger.exit_code in _HEADLINES:
        return _HEADLINES[ledger.exit_code]
    return "" if ledger.ended else "The session did not come to its end"


def chapters(ledger: Ledger) -> list[Chapter]:
    """Those of the chosen laws, in the order of the session."""
    laws: dict[str, list[str]] = {}
    for law in ledger.laws:
        laws.setdefault(law.partition(".")[0], []).append(law)
    return [_chapter(ledger, name, named) for name, named in laws.items()]


def status(ledger: Ledger, law: str, adapter: str) -> str:
    """What became of a law on an adapter."""
    verdict = ledger.verdicts.get((law, adapter))
    return NOT_REACHED if verdict is None else verdict.status


def said(counts: Mapping[str, int]) -> str:
    """Counts in words, the worst first: "1 finding, 11 hold". "-" where nothing was asked or promised."""
    asked = {word: counts[word] for word in _ORDER if counts.get(word) and word not in BELOW}
    told = (f"{count} {_SEVERAL.get(word, word) if count > 1 else word}" for word, count in asked.items())
    return ", ".join(told) or "-"


def labels(adapters: Sequence[str]) -> dict[str, str]:
    """A short name for each adapter, no two alike: of one in a file, the file's name and the attribute."""
    cut = {ref: ref if len(ref) <= _MANY else _cut(ref) for ref in adapters}
    alike = Counter(cut.values())
    return {ref: short if alike[short] == 1 else ref for ref, short in cut.items()}


def _cut(ref: str) -> str:
    target, colon, attribute = ref.rpartition(":")
    name = PurePath(target).name if "/" in target else target.rpartition(".")[2]
    return f"{name}{colon}{attribute}"


def _chapter(ledger: Ledger, name: str, laws: Sequence[str]) -> Chapter:
    counts = {ref: Counter(status(ledger, law, ref) for law in laws) for ref in ledger.plan.adapters}
    judged = [ledger.verdicts[pair] for pair in _pairs(laws, ledger.plan.adapters) if pair in ledger.verdicts]
    cases, seconds = sum(one.cases for one in judged), sum(one.seconds for one in judged)
    return Chapter(name, tuple(laws), counts, cases, seconds)


def _pairs(laws: Iterable[str], adapters: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((law, ref) for law in laws for ref in adapters)
