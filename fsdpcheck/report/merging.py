"""Merging: one ledger of the documents of all shards and blocks of a session. Imports neither torch nor hypothesis.

Each document is of a plan that differs from the others' in its shard and its seed alone. What is merged was judged with
the same code and the same versions, and nothing that the shards together should have judged is missing, or it is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fsdpcheck.errors import USAGE, UsageError, explain
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import Finding, Status, Verdict, exit_code
from fsdpcheck.report.document_reader import Document, opened
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan

_WORST_FIRST: Final[tuple[Status, ...]] = (
    "finding", "error", "no case", "too few cases", "not supported", "holds", "not asked", "not promised",
)  # fmt: skip
_NAMED: Final = 5


@dataclass(frozen=True)
class Part:
    """One document: that of one shard of one block."""

    path: Path
    told: Document

    @property
    def plan(self) -> Plan:
        return self.told.plan


def merged(paths: Sequence[Path]) -> Ledger:
    """The session that all documents are of; blocks of a check are one verdict.

    ``errors`` name shards that are missing or were interrupted. Raises UsageError for a file that is no document or was
    edited, and for documents of other plans, releases, versions or code.
    """
    parts = sorted((Part(path, opened(path)) for path in paths), key=lambda part: (part.plan.seed, part.plan.shard))
    first = parts[0]
    for other in parts[1:]:
        _require_same(first, other)
    _require_same_code(parts)
    ledger = Ledger(
        replace(first.plan, shard=(1, 1), block=(1, 1)),
        versions=dict(first.told.versions),
        began=first.told.began,
    )
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in _each_once(parts):
        found.setdefault((verdict.law, verdict.adapter), []).append(verdict)
    ledger.laws = tuple(sorted({law for law, _ in found}))
    ledger.verdicts = {pair: _one(blocks) for pair, blocks in found.items()}
    unaccepted: dict[str, list[str]] = {}
    for part in parts:
        unaccepted |= {ref: list(names) for ref, names in part.told.unaccepted.items()}
    ledger.unaccepted = unaccepted
    ledger.waived = {token: waiver for part in parts for token, waiver in part.told.waived.items()}
    ledger.errors = [*_errors_of(parts), *((text, USAGE) for text in _missing(parts))]
    seeds = sorted({part.plan.seed for part in parts})
    ledger.notes = (f"merged: {len(parts)} reports, {_counted(len(seeds), 'block')} of seeds {_spans(seeds)}",)
    ledger.take({"event": "end", "interrupted": any(part.told.interrupted for part in parts)})
    return ledger


def _require_same(first: Part, other: Part) -> None:
    """Raise UsageError for a part of another session."""
    mine, its = replace(other.plan, seed=first.plan.seed, shard=first.plan.shard, block=first.plan.block), first.plan
    told = [
        f"{name}: {getattr(mine, name)!r}, not {getattr(its, name)!r}"
        for name in vars(its)
        if getattr(mine, name) != getattr(its, name)
    ]
    told += [f"fsdpcheck {other.told.fsdpcheck}, not {first.told.fsdpcheck}"] * (
        other.told.fsdpcheck != first.told.fsdpcheck
    )
    then, now = first.told.versions, other.told.versions
    told += [f"{name} {now.get(name)}, not {then[name]}" for name in then if now.get(name) != then[name]]
    if (other.plan.shard[1], other.plan.block[1]) != (first.plan.shard[1], first.plan.block[1]):
        told.append(f"of {_cut(other.plan)}, not of {_cut(first.plan)}")
    if (begins := _begins(other.plan)) != _begins(first.plan):
        told.append(f"blocks from seed {begins} on, not from {_begins(first.plan)}")
    if told:
        where = f"{other.path}, beside {first.path}"
        raise UsageError(explain("reports of different sessions are not merged", got="; ".join(told), where=where))


def _require_same_code(parts: Sequence[Part]) -> None:
    """Raise UsageError where two parts were judged with different content of one file or another fsdpcheck."""
    known: dict[str, tuple[str, Path]] = {}
    for part in parts:
        for sources in part.told.sources.values():
            named = {"fsdpcheck itself": sources["own"], **_by_name(sources["files"]), **sources["packages"]}
            for name, content in named.items():
                then, path = known.setdefault(name, (content, part.path))
                if then != content:
                    where = f"{path} and {part.path}"
                    then_ = "judge both with the same code"
                    raise UsageError(
                        explain(f"reports of different code are not merged: {name}", where=where, then=then_)
                    )


def _cut(plan: Plan) -> str:
    return f"{_counted(plan.shard[1], 'shard')} and {_counted(plan.block[1], 'block')}"


def _begins(plan: Plan) -> int:
    """The seed of the first block."""
    return plan.seed - plan.block[0] + 1


def _by_name(files: Mapping[str, str]) -> dict[str, str]:
    """Content by the name of a file, where one alone has it: paths are others on other machines."""
    names = Counter(Path(path).name for path in files)
    return {Path(path).name: content for path, content in files.items() if names[Path(path).name] == 1}


def _each_once(parts: Iterable[Part]) -> list[Verdict]:
    """The verdicts of all parts. Raises UsageError for two of one check in one block."""
    seen: dict[tuple[int, str, str], Path] = {}
    found = []
    for part in parts:
        for verdict in part.told.verdicts:
            key = (part.plan.seed, verdict.law, verdict.adapter)
            if key in seen:
                where = f"{seen[key]} and {part.path}"
                what = f"{verdict.law} on {verdict.adapter} was judged twice with seed {part.plan.seed}"
                raise UsageError(explain(what, where=where, then="name each shard once"))
            seen[key] = part.path
            found.append(verdict)
    return found


def _one(blocks: Sequence[Verdict]) -> Verdict:
    """The verdict of all blocks of one check: the worst, with what all of them counted."""
    worst = min(blocks, key=lambda one: _WORST_FIRST.index(one.status))
    if len(blocks) == 1:
        return worst
    judged = [one for one in blocks if one.cases]
    census: Counter[str] = Counter()
    for one in blocks:
        census.update(one.census)
    findings = _findings(blocks)
    return replace(
        worst,
        cases=sum(one.cases for one in blocks),
        rejected=sum(one.rejected for one in blocks),
        seconds=sum(one.seconds for one in blocks),
        census=dict(census),
        undrawn=_in_all([one.undrawn for one in judged]),
        never=_in_all([one.never for one in judged]),
        left=tuple(dict.fromkeys(what for one in blocks for what in one.left)),
        finding=findings[0] if findings else None,
        behind=tuple(findings[1:]),
        exit_code=exit_code(one.exit_code for one in blocks),
    )


def _findings(blocks: Sequence[Verdict]) -> list[Finding]:
    """One of each root, which has the others' number of cases that fail alike."""
    groups = grouped(finding for one in blocks for finding in one.findings)
    return [replace(group[0], alike=len(group) - 1 + sum(one.alike for one in group)) for group in groups]


def _in_all(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for name in names[0] if all(name in other for other in names)) if names else ()


def _errors_of(parts: Iterable[Part]) -> list[tuple[str, int]]:
    return [(f"{part.path}: {one.text}", one.exit_code) for part in parts for one in part.told.errors]


def _missing(parts: Sequence[Part]) -> list[str]:
    """A sentence for each block of which a shard is not here."""
    (_, many), (_, blocks), begins, told = parts[0].plan.shard, parts[0].plan.block, _begins(parts[0].plan), []
    for seed in range(begins, begins + blocks):
        here = {part.plan.shard[0] for part in parts if part.plan.seed == seed}
        left = sorted({*range(1, many + 1)} - here)
        if left:
            told.append(f"of seed {seed} {_counted(len(left), 'shard')} of {many} missing: {_spans(left)}")
    return told


def _counted(many: int, word: str) -> str:
    return f"{many} {word}{'s' * (many != 1)}"


def _spans(numbers: Sequence[int]) -> str:
    """ "1-3, 7" of 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
