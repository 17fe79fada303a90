"""The power of laws in a table: for each family of cases, what each judge found of each planted error."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fsdpcheck.report.colour import Paint
from fsdpcheck.report.table import aligned


class Tally(Protocol):
    """What is shown of a power.measure.Tally."""

    @property
    def tier(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def judge(self) -> str: ...
    @property
    def honest(self) -> int: ...
    @property
    def alarms(self) -> int: ...
    @property
    def found(self) -> Mapping[str, int]: ...
    @property
    def effective(self) -> Mapping[str, int]: ...
    @property
    def smallest(self) -> Mapping[str, float]: ...


def text(tallies: Iterable[Tally], paint: Paint) -> str:
    """One table a family: errors down, judges across; then the smallest graded error each judge always finds."""
    groups = itertools.groupby(tallies, key=lambda tally: (tally.family, tally.tier))
    return "\n\n".join(_family(name, tier, list(group), paint) for (name, tier), group in groups)


def data(tallies: Iterable[Tally]) -> list[dict[str, Any]]:
    """The same as JSON data."""
    return [
        {
            "family": tally.family, "tier": tally.tier, "judge": tally.judge, "honest": tally.honest,
            "alarms": tally.alarms, "smallest": tally.smallest,
            "errors": {name: {"found": tally.found[name], "effective": n} for name, n in tally.effective.items()},
        }
        for tally in tallies
    ]  # fmt: skip


def _family(name: str, tier: str, tallies: Sequence[Tally], paint: Paint) -> str:
    first = tallies[0]
    rows = [("planted error", "effective", *(tally.judge for tally in tallies))]
    rows.append(("none (false alarms)", str(first.honest), *(f"{t.alarms}" for t in tallies)))
    for error, count in first.effective.items():
        rows.append((_words(error), str(count), *(_share(t.found[error], t.effective[error]) for t in tallies)))
    smallest = [f"  {tally.judge}: {_graded(tally.smallest)}" for tally in tallies]
    head = paint(f"{name} cases, tier {tier}", "bold")
    return "\n".join([head, aligned(rows, paint, range(1, len(rows[0]))), "smallest error always found:", *smallest])


def _words(error: str) -> str:
    return error.replace("_1e_", " 1e-").replace("_", " ")


def _share(found: int, effective: int) -> str:
    """Per cent, never rounded up to 100 or down to 0."""
    if not effective:
        return "-"
    per_cent = 100 * found / effective
    return f"{min(99.9, per_cent):.1f} %" if 99.5 <= per_cent < 100 else f"{max(per_cent, 0.1) if found else 0:.3g} %"


def _graded(smallest: Mapping[str, float]) -> str:
    return ", ".join(f"{_words(kind)} {size:.0e}" for kind, size in smallest.items()) or "none of the graded ones"
