"""Progress while running, on stderr: one live line on a terminal, otherwise plain lines, one a chapter or a verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.errors.excerpt import visible
from fsdpcheck.report.chapters import BELOW, chapters, said
from fsdpcheck.session.ledger import Ledger

_AT_ONCE: Final = ("finding", "error", "no case", "too few cases", "not supported")
"""Verdicts that are told as soon as they are there."""


class Progress(Protocol):
    """Listens to a session; ``close`` leaves the terminal as it was."""

    def __call__(self, ledger: Ledger, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def progress(adapters: Sequence[str] = (), verbose: bool = False) -> Progress:
    """The progress that suits stderr. ``adapters``: what is imported first, which may take long.

    ``verbose``: a line for each verdict where it is no terminal.
    """
    return _Live(adapters) if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _Lines(verbose)


class _Lines:
    """At first how much there is to judge; a line when a chapter of an adapter is done, or when any verdict is there.

    What is no pass is reported at once.
    """

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose

    def __call__(self, ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "verdict":
            count, asked = f"[{len(ledger.verdicts)}/{ledger.total}]", event["status"] not in BELOW
            if (self._verbose and asked) or event["status"] in _AT_ONCE:
                print(f"{count} {_told(event)}", file=sys.stderr, flush=True)
            if not self._verbose and (done := _chapter(ledger, event)):
                print(f"{count} {done}", file=sys.stderr, flush=True)
        elif event["event"] == "plan":
            print(_begun(ledger, event), file=sys.stderr, flush=True)
        elif event["event"] == "note":
            print(visible(event["text"]), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Live:
    """One line that counts cases; findings stay above it as they come."""

    def __init__(self, adapters: Sequence[str]) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")), highlight=False, markup=False)
        self._status = self._console.status(visible(f"importing {', '.join(adapters) or 'torch'}"))
        self._status.start()

    def __call__(self, ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "verdict" and event["status"] in _AT_ONCE:
            self._console.print(_told(event))
        elif event["event"] == "note":
            self._console.print(visible(event["text"]))
        if ledger.running:
            at, *others = ledger.running.values()
            more = f" (and {len(others)} more at once)" if others else ""
            count = f"{len(ledger.verdicts) + 1}/{ledger.total}"
            self._status.update(visible(f"{count} {at.adapter}: {at.law}, case {at.number}{more}"))

    def close(self) -> None:
        self._status.stop()


def _begun(ledger: Ledger, plan: Mapping[str, Any]) -> str:
    """ "34 checks to judge, of 141 laws on 1 adapter; the profile quick has 10 cases a law"."""
    promised = [law for ref, vain in plan["unpromised"].items() for law in ledger.laws if law not in vain]
    here = len(promised) - sum(law not in plan["unpromised"].get(ref, ()) for law, ref in ledger.elsewhere)
    profile, many = ledger.plan.profile, PROFILES[ledger.plan.profile]
    what = f"{_counted(here, 'check')} to judge, of {_counted(len(ledger.laws), 'law')}"
    return f"{what} on {_counted(len(ledger.plan.adapters), 'adapter')}; the profile {profile} has {many} cases a law"


def _counted(many: int, what: str) -> str:
    return f"{many} {what}{'s' * (many != 1)}"


def _told(event: Mapping[str, Any]) -> str:
    numbers = f"{event['cases']} cases, {event['seconds']:.1f} s"
    text = visible(f"{event['adapter']}: {event['law']}: {event['status']}")
    return text if event["status"] in ("not promised", "not asked") else f"{text} ({numbers})"


def _chapter(ledger: Ledger, event: Mapping[str, Any]) -> str:
    """The chapter that this verdict completes; "" where some law of it is still to be judged, or none was promised."""
    name, adapter = event["law"].partition(".")[0], event["adapter"]
    mine = next((one for one in chapters(ledger) if one.name == name), None)
    if mine is None or any((law, adapter) not in ledger.verdicts for law in mine.laws):
        return ""
    told = said(mine.counts[adapter])
    return "" if told == "-" else visible(f"{adapter}: {name}: {told}")
