"""Markdown of a session, for the summary of a job: the verdict, the findings, what holds chapter by chapter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import NOT_CHECKED, Finding, Verdict
from fsdpcheck.report import conditions, table, unjudged_cases, waivers
from fsdpcheck.report.chapters import chapters, headline, labels, said
from fsdpcheck.report.colour import uncoloured
from fsdpcheck.report.finding import render, troubles
from fsdpcheck.report.forms import places
from fsdpcheck.session.ledger import Ledger

_TROUBLES: Final = ("error", "no case", "too few cases", "not supported")
_SPECIAL: Final = re.compile(r"([\\`*_\[\]#!|~<>&$])")


def text(ledger: Ledger, root: str = "") -> str:
    """The session as Markdown; of what others wrote nothing that is Markdown or HTML."""
    ledger = shown(ledger)
    parts = [f"## fsdpcheck: {headline(ledger)}", _plain(table.summary(ledger))]
    groups = grouped(ledger.findings)
    parts += [_finding(group, number, ledger, root) for number, group in enumerate(groups, 1)]
    parts += [_details(one.partition("\n")[0], one) for one in troubles(_wrong(ledger))]
    parts += [_details("ERROR", told) for told, _ in ledger.errors]
    parts += ["\n".join(_table(ledger))] if ledger.laws else []
    parts += ["\n".join(f"- {_plain(line)}" for line in _limits(ledger))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _wrong(ledger: Ledger) -> Iterator[Verdict]:
    for verdict in ledger.verdicts.values():
        if verdict.status in _TROUBLES and not verdict.reason.startswith(NOT_CHECKED):
            yield verdict


def _finding(group: Sequence[Finding], number: int, ledger: Ledger, root: str) -> str:
    first, *others = group
    place = places.of_finding(first, ledger, root)
    rows = [("guarantee", first.guarantee), ("broken", first.what), ("where", first.where), ("cause", first.cause)]
    rows += [("at", str(place) if place is not None else ""), ("also breaks", ", ".join(one.law for one in others))]
    rows += [("waived", waivers.of_root(group, ledger))]
    told = "\n".join(f"- **{name}**: {_plain(said)}" for name, said in rows if said)
    whole = _details("the finding in full", render([*group], number, uncoloured, ledger.plan.installs, ledger.folder))
    return f"### {number}. {_code(first.adapter)} breaks {_code(first.law)}\n\n{told}\n\n{whole}"


def _table(ledger: Ledger) -> Iterator[str]:
    short = labels(ledger.plan.adapters)
    yield _row(["chapter", *(_plain(short[ref]) for ref in ledger.plan.adapters), "cases"])
    yield "|---" * (len(ledger.plan.adapters) + 1) + "|--:|"
    for chapter in filter(lambda one: one.asked, chapters(ledger)):
        yield _row([_plain(chapter.name), *(said(own) for own in chapter.counts.values()), str(chapter.cases)])


def _limits(ledger: Ledger) -> Iterator[str]:
    """What the session says nothing of."""
    yield from conditions.sentences(verdict.law for verdict in ledger.verdicts.values() if verdict.cases)
    for told in (
        table.left(ledger),
        unjudged_cases.of_session(ledger),
        table.undrawn(ledger),
        table.unaccepted(ledger),
    ):
        yield from filter(None, told.splitlines())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _details(head: str, told: str) -> str:
    """A fold with ``told`` as it is: its fence is longer than any in it."""
    longest = max(map(len, re.findall(r"`+", told)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"<details><summary>{_html(head)}</summary>\n\n{fence}text\n{told}\n{fence}\n\n</details>"


def _plain(text: str) -> str:
    """One line in which nothing is markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """One line as code, whatever it holds, in a heading or a sentence."""
    flat = " ".join(text.split())
    longest = max(map(len, re.findall(r"`+", flat)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {flat} {fence}" if longest else f"`{flat}`"


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "&#96;")
