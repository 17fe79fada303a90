"""The table of a session, a line a chapter or a row a law, and the line that sums it up."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from fsdpcheck.errors import HOLDS
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import NOT_CHECKED, Verdict
from fsdpcheck.report.chapters import BELOW, NOT_REACHED, chapters, labels, said, status
from fsdpcheck.report.colour import Paint
from fsdpcheck.session.ledger import Ledger

_HEAD = ("adapter", "law", "verdict", "cases", "rejected", "time", "tier", "")
_RIGHT = {3, 4, 5}
_COUNTED: Final = ("error", "no case", "too few cases", "not supported", *BELOW)

_NAMED: Final = 3
"""Most laws, and most promises, that are named in a line of what is not judged; --json has all."""

_SHOWN: Final = 6
"""Most traits of an adapter that a short report names."""

_COLOURS = {
    "holds": "green",
    "finding": "red",
    "not promised": "yellow",
    "not asked": "yellow",
    "no case": "red",
    "too few cases": "red",
    "not supported": "red",
    "error": "red",
}


def table(ledger: Ledger, paint: Paint) -> str:
    """One row a verdict; rows not reached say so. Below, by reason: errors that a law above met, and laws not asked."""
    every = ((adapter, law) for adapter in ledger.plan.adapters for law in ledger.laws)
    pairs = [(adapter, law) for adapter, law in every if (law, adapter) not in ledger.elsewhere]
    again = _again(ledger)
    folded = {(adapter, law) for (adapter, _), laws in again.items() for law in laws}
    rows = [_row(ledger, *pair) for pair in pairs if pair not in folded and status(ledger, *pair[::-1]) not in BELOW]
    parts = [aligned([_HEAD, *rows], paint)] if rows else []
    below = [line for adapter in ledger.plan.adapters for line in _below(ledger, adapter)]
    return "\n".join([*parts, *_told_again(again, paint), *(paint(line, "yellow") for line in below)])


def by_chapter(ledger: Ledger, paint: Paint) -> str:
    """One line a chapter, a column an adapter. Below: errors that a law above met, and how many laws are not asked.

    A chapter of which nothing was asked has no line; its laws are among those that are counted below.
    """
    found, short = [one for one in chapters(ledger) if one.asked], labels(ledger.plan.adapters)
    head = ["chapter", *short.values(), "cases", "time"]
    rows = [[one.name, *map(said, one.counts.values()), str(one.cases), f"{one.seconds:.1f} s"] for one in found]
    whole = aligned([head, *rows], paint, (len(head) - 2, len(head) - 1)).splitlines()
    painted = [paint(line, "red") if one.bad else line for line, one in zip(whole[1:], found, strict=True)]
    below = [line for adapter in ledger.plan.adapters for line in _folded(ledger, adapter)]
    lines = [whole[0], *painted] if found else []
    return "\n".join([*lines, *_told_again(_again(ledger), paint), *(paint(line, "yellow") for line in below)])


def _told_again(again: dict[tuple[str, str], list[str]], paint: Paint) -> list[str]:
    return [paint(f"{adapter}: {said}: {', '.join(laws)}", "red") for (adapter, said), laws in again.items()]


def summary(ledger: Ledger) -> str:
    """The session in one line."""
    verdicts = list(ledger.verdicts.values())
    counts = Counter(verdict.status for verdict in verdicts)
    parts = [f"{counts['holds']} checks hold", _findings(ledger)]
    parts += [f"{counts[word]} {word}" for word in _COUNTED if counts[word]]
    left = ledger.total - len(verdicts)
    parts += [f"{left} not reached"] if left else []
    cases, rejected = sum(verdict.cases for verdict in verdicts), sum(verdict.rejected for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    return f"{', '.join(parts)}; {cases} distinct cases judged, {rejected} rejected, {seconds:.1f} s"


def unaccepted(ledger: Ledger, verbose: bool = True) -> str:
    """A line an adapter of which something holds: the traits it does not accept, of which that says nothing.

    Without ``verbose`` many are only counted.
    """
    holds = {verdict.adapter for verdict in ledger.verdicts.values() if verdict.status == "holds"}
    left = {adapter: names for adapter, names in ledger.unaccepted.items() if names and adapter in holds}
    if not verbose and left and max(map(len, left.values())) > _SHOWN:
        told = [f"{adapter}: {len(names)} traits are not accepted, so in no case" for adapter, names in left.items()]
        return "\n".join([*told, "(-v names them, and `fsdpcheck list traits` says what each of them is)"])
    lines = [f"{adapter}: not accepted, so in no case: {', '.join(names)}" for adapter, names in left.items()]
    return "\n".join(
        lines + ["(Features.accepts says what is; `fsdpcheck list traits` what each of them is)"] * bool(lines)
    )


def undrawn(ledger: Ledger) -> str:
    """A line an adapter: the traits it accepts that no judged case of any law demanded; "" where there are none.

    And a line for each number of ranks that was requested and that laws which hold had in no case.
    """
    lines = []
    for adapter in ledger.plan.adapters:
        judged = [v for v in ledger.verdicts.values() if v.adapter == adapter and v.status == "holds" and v.undrawn]
        never = set.intersection(*(set(verdict.undrawn) for verdict in judged)) if judged else set()
        if never:
            lines.append(f"{adapter}: accepted, but in no case of these laws: {', '.join(sorted(never))}")
    lines += ["(law by law: undrawn in --json)"] * bool(lines)
    return "\n".join([*lines, *_sizes_without_a_case(ledger)])


def _sizes_without_a_case(ledger: Ledger) -> Iterator[str]:
    """A line for each of several ranks; many laws say nothing on one by their nature."""
    several = [size for size in dict.fromkeys(ledger.plan.world_sizes) if size > 1]
    for adapter, size in itertools.product(ledger.plan.adapters, several):
        holding = [v for v in ledger.verdicts.values() if v.adapter == adapter and v.status == "holds"]
        without = [verdict.law for verdict in holding if f"W={size}" not in verdict.census]
        if without:
            names = ", ".join(without[:_NAMED]) + f" and {len(without) - _NAMED} more" * (len(without) > _NAMED)
            told = f"{size} ranks were requested, in no case of {len(without)} of the {len(holding)} laws that hold"
            yield f"{adapter}: {told}: {names}"


def left(ledger: Ledger) -> str:
    """A line for each thing that was left changed of a process, with how many laws saw it; "" where nothing was."""
    seen = Counter((v.adapter, what) for v in ledger.verdicts.values() for what in v.left)
    lines = [f"{adapter}: {what} ({count} law{'s' * (count > 1)})" for (adapter, what), count in seen.items()]
    told = "(settings and names are put back after each run, so that nobody else met them; docs/threat-model.md)"
    return "\n".join([*lines, told] if lines else [])


def aligned(rows: Sequence[Sequence[str]], paint: Paint, right: Container[int] = _RIGHT) -> str:
    """Rows in columns, those numbered in ``right`` flush right; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if number == 0:
            cells = [paint(cell, "bold") for cell in cells]
        elif len(row) > 2 and row[2] in _COLOURS:
            cells[2] = paint(cells[2], _COLOURS[row[2]])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(ledger: Ledger, adapter: str, law: str) -> tuple[str, ...]:
    verdict = ledger.verdicts.get((law, adapter))
    if verdict is None:
        return (adapter, law, NOT_REACHED, "-", "-", "-", "", "")
    return (
        adapter,
        law,
        verdict.status,
        str(verdict.cases),
        str(verdict.rejected),
        f"{verdict.seconds:.1f} s",
        _tiers(verdict),
        _note(verdict),
    )


def _tiers(verdict: Verdict) -> str:
    """By which standards of equality the cases were judged: "exact", or "exact 12, any C 3"."""
    counts = {key.removeprefix("tier "): n for key, n in verdict.census.items() if key.startswith("tier ")}
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{tier} {n}" for tier, n in counts.items())


def _below(ledger: Ledger, adapter: str) -> list[str]:
    """A line for each reason: of which laws nothing is said, and why."""
    lines = []
    for word in BELOW:
        laws: dict[str, dict[str, str]] = {}
        for law in ledger.laws:
            if status(ledger, law, adapter) == word:
                promise, why = _why(ledger.verdicts[law, adapter].reason)
                laws.setdefault(why, {})[law] = promise
        lines += [f"{adapter}: {word}: {_names(found)} ({_without(found)}{why})" for why, found in laws.items()]
    return lines


def _folded(ledger: Ledger, adapter: str) -> list[str]:
    """The same in a line a status where they are many."""
    counts = Counter(status(ledger, law, adapter) for law in ledger.laws)
    if sum(counts[word] for word in BELOW) <= _NAMED:
        return _below(ledger, adapter)
    return [f"{adapter}: {word}: {counts[word]} laws (-v names them, and says why)" for word in BELOW if counts[word]]


def _why(reason: str) -> tuple[str, str]:
    """(the promise that is not made, the adapter's reason): several promises are mostly not made for one reason."""
    said = re.fullmatch(r"no promise '([^']*)': (.*)", reason, re.DOTALL)
    return (said[1], said[2]) if said is not None else ("", reason)


def _names(laws: Iterable[str]) -> str:
    """The names of a few laws; of more how many there are, and of which chapters."""
    names = list(laws)
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names)} laws of {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}"


def _without(found: Mapping[str, str]) -> str:
    """ "no promise 'noise': ", with the promises that the laws in ``found`` lack."""
    promises = [promise for promise in dict.fromkeys(found.values()) if promise]
    more = f" and {len(promises) - _NAMED} more" if len(promises) > _NAMED else ""
    return f"no promise {', '.join(map(repr, promises[:_NAMED]))}{more}: " if promises else ""


def _again(ledger: Ledger) -> dict[tuple[str, str], list[str]]:
    """(adapter, what is said) -> laws that ended in an error which a law above met, or were left out because of it."""
    first: dict[tuple[str, ...], str] = {}
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in (ledger.verdicts.get((law, ref)) for ref in ledger.plan.adapters for law in ledger.laws):
        if verdict is None or verdict.status != "error":
            continue
        if verdict.reason.startswith(NOT_CHECKED):
            found.setdefault((verdict.adapter, verdict.reason), []).append(verdict.law)
        elif (above := first.setdefault(verdict.root, verdict.law)) != verdict.law:
            found.setdefault((verdict.adapter, f"the error of {above} ends also"), []).append(verdict.law)
    return found


def _note(verdict: Verdict) -> str:
    if verdict.finding is not None:
        more = len(verdict.behind)
        return verdict.finding.what + f", and {more} other finding{'s' * (more > 1)}" * bool(more)
    lines = verdict.reason.splitlines()
    short = verdict.exit_code == HOLDS or verdict.reason.startswith(NOT_CHECKED)
    return "" if not lines else lines[0] if short else "see below"


def _findings(ledger: Ledger) -> str:
    findings = ledger.findings
    if not findings:
        return "0 findings"
    roots = len(grouped(findings))
    return f"{len(findings)} finding{'s' * (len(findings) > 1)} of {roots} root{'s' * (roots > 1)}"
