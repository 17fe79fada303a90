"""Plots of the page: cases by number of ranks, sessions over time, and the smallest errors that judges find."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from fsdpcheck.report.chapters import BELOW, status
from fsdpcheck.report.document_reader import Judged
from fsdpcheck.report.page.picture import CHARACTER, Picture, cut
from fsdpcheck.session.ledger import Ledger

KINDS: Final = {"finding": "bad", "trouble": "odd", "holds": "good", "below": "none"}
"""What a session's checks are counted as, from the bottom of a column to its top -> the look of it."""
NONE: Final = "\N{EN DASH}"
"""Stands where nothing was asked or measured."""
_TALL: Final = 120.0


def kind(word: str) -> str:
    """What a status is counted as."""
    if word in ("holds", "finding"):
        return word
    return "below" if word in BELOW else "trouble"


def ranks(ledger: Ledger, adapter: str) -> Picture | None:
    """Judged cases of one adapter by their number of ranks, a column each; None where nothing was judged."""
    counts = of_ranks(ledger, adapter)
    if not counts:
        return None
    picture, most, wide = Picture(f"Cases by number of ranks, {adapter}"), max(counts.values()), 42.0
    picture.told = ", ".join(f"{count} on {size}" for size, count in sorted(counts.items()))
    for place, (size, count) in enumerate(sorted(counts.items())):
        x, tall = place * wide + 8, max(count / most * 84, 2)
        picture.rect(x, 100 - tall, wide - 14, tall, "good", f"{count} cases on {size} ranks", 2)
        picture.text(x + (wide - 14) / 2, 94 - tall, str(count), "tiny", "middle")
        picture.text(x + (wide - 14) / 2, 114, f"W={size}", "soft", "middle")
    picture.line(0, 100.5, len(counts) * wide + 4, 100.5, "axis")
    return picture


def of_ranks(ledger: Ledger, adapter: str) -> Counter[int]:
    """Number of ranks -> judged cases on so many, over all laws."""
    found: Counter[int] = Counter()
    for verdict in ledger.verdicts.values():
        if verdict.adapter == adapter:
            sizes = ((label[2:], count) for label, count in verdict.census.items() if label.startswith("W="))
            found.update({int(size): count for size, count in sizes if re.fullmatch(r"[0-9]{1,4}", size)})
    return found


def history(sessions: Sequence[Ledger]) -> Picture:
    """What became of the checks of each session, a column each, the oldest first."""
    picture, wide = Picture("Checks over sessions"), 64.0
    tallies = [_tally(session) for session in sessions]
    most = max((sum(own.values()) for own in tallies), default=1) or 1
    picture.told = "; ".join(f"{_when(s)}: {_words(own)}" for s, own in zip(sessions, tallies, strict=True))
    for place, (session, own) in enumerate(zip(sessions, tallies, strict=True)):
        x, y = place * wide + 34, _TALL + 14
        for name, look in KINDS.items():
            tall = max(own[name] / most * _TALL, 2.5 * (own[name] > 0))  # one finding among hundreds is seen
            y -= tall
            if own[name]:
                picture.rect(x, y, wide - 26, tall, look, f"{_when(session)}: {own[name]} {_NAMES[name]}", 1)
        bad = own["finding"]
        picture.text(x + (wide - 26) / 2, y - 4, str(bad) if bad else "✓", "bad" if bad else "soft", "middle")
        picture.text(x + (wide - 26) / 2, _TALL + 30, _when(session)[5:10], "soft", "middle", _when(session))
        picture.text(x + (wide - 26) / 2, _TALL + 43, _when(session)[11:16], "tiny", "middle")
    picture.text(28, 18, str(most), "tiny", "end")
    picture.text(28, _TALL + 14, "0", "tiny", "end")
    picture.line(32, _TALL + 14.5, len(sessions) * wide + 34, _TALL + 14.5, "axis")
    return picture


_NAMES: Final = {"finding": "with a finding", "trouble": "undecided", "holds": "hold", "below": "not promised or asked"}


def legend() -> dict[str, str]:
    """Look -> what it is, of a history."""
    return {look: _NAMES[name] for name, look in KINDS.items()}


def changes(sessions: Sequence[Ledger]) -> Iterator[tuple[str, str, list[str]]]:
    """(adapter, law, its status in each session, "" where it was not chosen) of checks that did not stay the same."""
    pairs = dict.fromkeys((ref, law) for one in sessions for ref in one.plan.adapters for law in one.laws)
    for ref, law in pairs:
        words = [status(one, law, ref) if ref in one.plan.adapters and law in one.laws else "" for one in sessions]
        if len({word for word in words if word}) > 1:
            yield ref, law, words


def power(judged: Sequence[Judged]) -> Picture:
    """The smallest graded error that each judge always finds, on a logarithmic axis; a row a judge and kind."""
    rows = [
        (one.judge, kind.replace("_", " "), size) for one in judged for kind, size in one.smallest.items() if size > 0
    ]
    picture, left = Picture(f"The smallest error always found: {judged[0].family} cases"), 0.0
    if not rows:
        picture.text(0, 14, "no graded error is always found", "soft")
        return picture
    left = CHARACTER * max(len(cut(f"{judge}: {kind}", 44)) for judge, kind, _ in rows) + 12
    low = math.floor(min(math.log10(size) for *_, size in rows)) - 1
    high = max(math.ceil(max(math.log10(size) for *_, size in rows)), low + 2)
    step = 300 / (high - low)
    picture.told = "; ".join(f"{judge} finds {kind} of {size:.0e}" for judge, kind, size in rows)
    tall = 18 * len(rows) + 6
    for exponent in range(low, high + 1, math.ceil((high - low) / 5)):
        x = left + (exponent - low) * step
        picture.line(x, 0, x, tall, "grid")
        picture.text(x, tall + 12, f"1e{exponent}", "tiny", "middle")
    for number, (judge, kind, size) in enumerate(rows):
        x, y = left + (math.log10(size) - low) * step, 18 * number + 10
        picture.text(0, y + 4, cut(f"{judge}: {kind}", 44), told=f"{judge}: {kind}")
        picture.line(left, y, x, y, "stem")
        picture.circle(x, y, 4.5, "dot", f"{judge} always finds {kind} of {size:.0e} and more")
    return picture


def _tally(session: Ledger) -> Counter[str]:
    words = (status(session, law, ref) for ref in session.plan.adapters for law in session.laws)
    return Counter(map(kind, words))


def _words(own: Mapping[str, int]) -> str:
    return ", ".join(f"{own[name]} {_NAMES[name]}" for name in KINDS if own[name]) or "nothing"


def _when(session: Ledger) -> str:
    return session.began[:16].replace("T", " ")
