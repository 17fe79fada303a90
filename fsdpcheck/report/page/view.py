"""What the page shows, as plain data: the verdict, findings, the matrix, the space of cases, the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fsdpcheck.case.vocabulary import TRAITS
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import NOT_CHECKED, Finding, Verdict
from fsdpcheck.report import conditions, table, unjudged_cases, waivers
from fsdpcheck.report.chapters import ALL_HOLDS, Chapter, chapters, headline, labels, said, status
from fsdpcheck.report.finding import alike, avoidable, confirmed, replay_command, troubles
from fsdpcheck.report.forms import places
from fsdpcheck.report.page import calls_picture, case_picture, plots
from fsdpcheck.report.page.picture import Picture
from fsdpcheck.session.ledger import Ledger

_TROUBLES: Final = ("error", "no case", "too few cases", "not supported")
_OF_VALUES: Final = ("value", "undetermined")
"""Kinds of findings whose law says what is wrong; of others the run itself does."""
_FEW: Final = 24
"""Laws up to which every chapter is open from the start."""
_SIGNS: Final = {"finding": "✕", "holds": "", "not promised": plots.NONE, "not asked": plots.NONE, "not reached": "?"}


@dataclass(frozen=True)
class Shown:
    """One root: its first finding, the others that it breaks, and what is drawn of it."""

    number: int
    finding: Finding
    head: str
    place: str
    facts: tuple[tuple[str, str], ...]
    replay: str
    others: tuple[tuple[str, str], ...]
    case: Picture | None
    calls: Picture | None
    short: Mapping[str, str]


def head(ledger: Ledger) -> dict[str, Any]:
    """The verdict in words, and what was run."""
    plan, code = ledger.plan, ledger.exit_code
    facts = {
        "began": ledger.began.replace("T", " "),
        "adapters": ", ".join(plan.adapters),
        "profile": plan.profile,
        "ranks": ", ".join(map(str, plan.world_sizes)) or "the profile's",
        "engine": plan.engine,
        "seed": str(plan.seed),
        "planted": ", ".join(plan.installs),
        "avoided": ", ".join(plan.avoid),
        "model": plan.model,
        "versions": ", ".join(f"{name} {version}" for name, version in ledger.versions.items()),
    }
    told = headline(ledger)
    red = any(finding.token not in ledger.waived for finding in ledger.findings)
    look = "bad" if red else "good" if told == ALL_HOLDS else "odd"
    known = {name: value for name, value in facts.items() if value}
    return {"told": told, "look": look, "summary": table.summary(ledger), "facts": known, "code": code}


def findings(ledger: Ledger, root: str) -> Iterator[Shown]:
    """Each root, the first finding of it in full. Files are told relative to the folder of the session."""
    installs, folder = ledger.plan.installs, ledger.folder
    for number, (first, *others) in enumerate(grouped(ledger.findings), 1):
        place = places.of_finding(first, ledger, root)
        facts = {
            "where": first.where, "lines": first.lines,
            "stage": first.stage, "when": first.when,
            "waived": waivers.of_root([first, *others], ledger),
            "alike": alike(first),
            "avoid": f"--avoid {trait} leaves such cases out" if (trait := avoidable(first)) else "",
            "confirmed on": confirmed(first),
        }  # fmt: skip
        yield Shown(
            number,
            replace(first, got=_without(folder, first.got), wanted=_without(folder, first.wanted)),
            _without(folder, first.what if first.kind in _OF_VALUES else first.got.partition("\n")[0]),
            str(place) if place is not None else "",
            tuple((name, _without(folder, value)) for name, value in facts.items() if value),
            replay_command(first, installs, folder),
            tuple((other.law, replay_command(other, installs, folder)) for other in others),
            case_picture.drawn(first),
            calls_picture.drawn(first.ranks),
            calls_picture.legend(first.ranks),
        )


def _without(folder: str, text: str) -> str:
    return text.replace(f"{folder}/", "") if len(folder) > 1 else text


def wrong(ledger: Ledger) -> list[str]:
    """Verdicts that are errors or ran too little, in words, and what ended the session."""
    bad = (one for one in ledger.verdicts.values() if one.status in _TROUBLES)
    told = troubles(one for one in bad if not one.reason.startswith(NOT_CHECKED))
    return [*told, *(f"ERROR: {text}" for text, _ in ledger.errors)]


def matrix(ledger: Ledger) -> dict[str, Any]:
    """Chapters with their laws, and what became of each law on each adapter."""
    found = chapters(ledger)
    few = len(ledger.laws) <= _FEW
    return {
        "adapters": labels(ledger.plan.adapters),
        "chapters": [_chapter(ledger, one, few or one.bad) for one in found],
        "words": dict(Counter(status(ledger, law, ref) for law in ledger.laws for ref in ledger.plan.adapters)),
    }


def _chapter(ledger: Ledger, chapter: Chapter, opened: bool) -> dict[str, Any]:
    rows = [
        {
            "law": law,
            "guarantee": ledger.guarantees.get(law, ""),
            "cells": [_cell(ledger, law, ref) for ref in _refs(ledger)],
        }
        for law in chapter.laws
    ]
    sums = [{"words": said(chapter.counts[ref]), "look": _worst(chapter.counts[ref])} for ref in _refs(ledger)]
    return {"name": chapter.name, "rows": rows, "sums": sums, "open": opened, "cases": chapter.cases}


def _refs(ledger: Ledger) -> Sequence[str]:
    return ledger.plan.adapters


def _worst(counts: Mapping[str, int]) -> str:
    kinds = {plots.kind(word) for word, count in counts.items() if count}
    return next((look for name, look in plots.KINDS.items() if name in kinds), "none")


def _cell(ledger: Ledger, law: str, adapter: str) -> dict[str, Any]:
    verdict = ledger.verdicts.get((law, adapter))
    word = status(ledger, law, adapter)
    sign = _SIGNS.get(word, "!") or str(verdict.cases if verdict is not None else "")
    told = f"{law} on {adapter}: {word}"
    told += f", {verdict.cases} cases" if verdict is not None and verdict.cases else ""
    more = _more(verdict) if verdict is not None else [("reason", "the session ended before it")]
    return {"look": plots.KINDS[plots.kind(word)], "sign": sign, "word": word, "told": told, "more": more}


def _more(verdict: Verdict) -> list[tuple[str, str]]:
    """What is told of one check when it is chosen."""
    judged = verdict.cases or verdict.rejected
    known = {
        "cases": f"{verdict.cases} judged, {verdict.rejected} rejected, {verdict.seconds:.1f} s" if judged else "",
        "standards": ", ".join(
            f"{key[5:]} {count}" for key, count in verdict.census.items() if key.startswith("tier ")
        ),
        "reason": verdict.reason,
        "broken": "\n".join(f"{one.what}; {one.where}" for one in verdict.findings),
        "never judged": "; ".join(verdict.never),
        "accepted, in no case": ", ".join(verdict.undrawn),
        "left changed": "\n".join(verdict.left),
    }
    return [(name, value) for name, value in known.items() if value]


def coverage(ledger: Ledger) -> dict[str, Any]:
    """Judged cases by trait and adapter, and by number of ranks."""
    refs, drawn = _refs(ledger), {ref: _census(ledger, ref) for ref in _refs(ledger)}
    most = max((count for own in drawn.values() for trait, count in own.items() if trait in TRAITS), default=0)
    rows: list[dict[str, Any]] = []
    for trait, row in TRAITS.items():
        cells = [_of_trait(ledger, ref, trait, drawn[ref][trait], most) for ref in refs]
        rows.append(
            {
                "trait": trait,
                "meaning": row.meaning,
                "cells": cells,
                "most": max((c["count"] for c in cells), default=0),
            }
        )
    asked = [one for one in rows if any(cell["look"] != "none" for cell in one["cells"])]
    return {
        "rows": sorted((one for one in asked if one["most"]), key=lambda one: -one["most"]),
        "undrawn": [one["trait"] for one in asked if not one["most"]],
        "refused": [one["trait"] for one in rows if one not in asked],
        "ranks": [(ref, picture) for ref in refs if (picture := plots.ranks(ledger, ref)) is not None],
        "any": any(one["most"] for one in rows),
    }


def _of_trait(ledger: Ledger, adapter: str, trait: str, count: int, most: int) -> dict[str, Any]:
    refused, avoided = trait in ledger.unaccepted.get(adapter, ()), trait in ledger.plan.avoid
    words = "avoided" if avoided else "not accepted" if refused else "none drawn" if not count else ""
    return {"count": count, "words": words, "look": "none" if refused or avoided else "bad" if not count else "good",
            "share": round(100 * count / most, 1) if most else 0}  # fmt: skip


def _census(ledger: Ledger, adapter: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for verdict in ledger.verdicts.values():
        if verdict.adapter == adapter:
            found.update(verdict.census)
    return found


def limits(ledger: Ledger) -> list[str]:
    """What the session says nothing of, a sentence each."""
    found = conditions.sentences(verdict.law for verdict in ledger.verdicts.values() if verdict.cases)
    for told in (
        table.left(ledger),
        unjudged_cases.of_session(ledger),
        table.undrawn(ledger),
        table.unaccepted(ledger),
    ):
        found += [line for line in told.splitlines() if line and not line.startswith("(")]
    return [*ledger.notes, *found]
