"""``fsdpcheck doctor``: what works on this machine, and what to fix first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fsdpcheck.cli import settings
from fsdpcheck.cli.gate import SETTINGS
from fsdpcheck.errors import NO_PROGRESS, USAGE, UsageError, explain
from fsdpcheck.errors.excerpt import shown, visible
from fsdpcheck.findings.verdict import exit_code
from fsdpcheck.report import colour
from fsdpcheck.session import machine
from fsdpcheck.session.child_process import Crew, Stopped

_DEFAULT: Final = "ddp"
_EPILOG: Final = """examples:
  fsdpcheck doctor                                     this machine, with what its gate judges, or with torch's own DDP
  fsdpcheck doctor --adapter train.py:MyAdapter        and your adapter: how long it takes to import, what it promises
Of each law that an adapter promises one small case is run, which is no verdict: that is what fsdpcheck run gives.

exit codes:
  0 all that was tried works   1 a law breaks on its small case   2 something to install, or an adapter that is wrong
  3 internal error   4 no progress   130 interrupted
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    doctor = commands.add_parser(
        "doctor",
        help="what works on this machine, and what to fix first",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.set_defaults(command=_doctor)
    what = "examine this adapter: a built-in name, pkg.mod:attr or file.py:attr; repeatable"
    what += f" (default: those of a gate's settings, else {_DEFAULT})"
    doctor.add_argument("--adapter", action="append", default=[], metavar="NAME", help=what)
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON (default: none)")


def _doctor(options: argparse.Namespace) -> int:
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UsageError(explain("--json names a place in a folder that is not there", got=options.json))
    paint, told, problems = colour.painter(sys.stdout), list[dict[str, Any]](), list[tuple[str, int]]()
    of_gate = [] if options.adapter else settings.adapters(SETTINGS)
    refs = list(dict.fromkeys(options.adapter or of_gate or [_DEFAULT]))
    for event in _examined(refs):
        told.append(event)
        if event.get("problem"):
            problems.append((f"{event['name']}: {event['problem']}", event["code"]))
        for line in _lines(event):
            print(paint(visible(line), "red" if event.get("problem") else ""), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"schema": 1, "found": told}, indent=1) + "\n", encoding="utf-8")
    tried = sum(event["event"] == "law" for event in told)
    print()
    if not problems:
        print(paint(f"all of it works; {tried} laws were tried on one small case each, which is no verdict", "green"))
        following = "gate" if of_gate else f"run {' '.join(f'--adapter {ref}' for ref in refs)}"
        print(f"next: fsdpcheck {following}")
    else:
        first, *others = shown([text for text, _ in problems])
        print(paint(f"fix first: {first}", "red"))
        print(f"{len(others)} more above" if others else "nothing else is wrong")
    return exit_code(code for _, code in problems)


def _examined(refs: list[str]) -> Iterator[dict[str, Any]]:
    """What is found, as events, in the order in which it should be mended."""
    for group, facts in (("packages", machine.packages()), ("machine", machine.machine())):
        yield {"event": "heading", "name": group}
        for fact in facts:
            problem = f"{fact.found}; next: {fact.mend}" if fact.mend else ""
            yield {"event": "fact", "name": fact.name, "told": fact.found, "problem": problem, "code": USAGE}
    with Crew.forwarding_interrupts() as crew:
        crew.start("examine", [json.dumps(refs)])
        for child, event in crew.told():
            if not isinstance(event, str):
                if event["event"] == "end":
                    child.ended = True
                else:
                    yield {"name": "fsdpcheck", "told": "", **event}
            elif crew.interrupted:
                raise KeyboardInterrupt
            elif not child.ended:
                code = NO_PROGRESS if isinstance(event, Stopped) else 3
                yield {
                    "event": "error",
                    "name": "the examination",
                    "told": "",
                    "problem": f"it died: {event}",
                    "code": code,
                }


def _lines(event: dict[str, Any]) -> Iterator[str]:
    """An event as it is printed, under headings where a group begins."""
    kind = event["event"]
    if kind == "heading":
        yield f"{event['name']}:"
    elif kind == "threads":
        yield f"  {'threads of torch':<26} {event['threads']} by default; sessions compute in 1"
        yield "engines:"
    elif kind == "adapter":
        yield f"adapter {event['name']}, imported in {event['seconds']:.1f} s:"
        yield f"  {event['told'] or 'cannot be used'}"
        yield from (f"    {line}" for line in event["problem"].splitlines())
    else:
        state = "" if kind == "fact" or event["told"].startswith("(") else "WRONG " if event["problem"] else "ok "
        seconds = f", {event['seconds']:.1f} s" if "seconds" in event else ""
        yield f"  {event['name']:<26} {state}{event['told']}{seconds}".rstrip(", ")
        yield from (f"    {line}" for line in event["problem"].splitlines())
