"""One finding in words: the law, the smallest case, what was got and wanted, and the line that replays it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Final, get_args

from fsdpcheck.case import Trait
from fsdpcheck.findings.tokens import command
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.loading.references import canonical
from fsdpcheck.report.colour import Paint
from fsdpcheck.report.source_text import with_source

_OF_LINES: Final = "run in all cases that fail, and in none that one change makes hold"


_ON_SIMULATED: Final = "looked for on simulated ranks alone: replay it with --engine simulated"


def render(group: list[Finding], number: int, paint: Paint, installs: Iterable[str] = (), folder: str = "") -> str:
    """One root as text: its first finding in full, the other laws it breaks in a line each.

    ``folder``: in which it was found, the working directory by default.
    """
    first, *others = group
    lines = [paint(f"FINDING {number}: {first.adapter} breaks {first.law}", "red")]
    lines += _entry("guarantee", first.guarantee) if first.guarantee else []
    lines += _entry("case", first.words)
    lines += _entry("broken", first.what)
    lines += _entry("got", with_source(first.got)) + _entry("wanted", first.wanted) + _entry("where", first.where)
    lines += _entry("cause", cause) if (cause := _cause(first)) else []
    lines += _entry("stage", first.stage) if first.stage else []
    lines += _entry("when", first.when) if first.when else []
    lines += _entry("lines", f"{first.lines}\n{_OF_LINES}") if first.lines else []
    lines += _entry("alike", alike(first)) if first.alike else []
    lines += _entry("avoid", f"--avoid {trait} leaves such cases out") if (trait := avoidable(first)) else []
    lines += [f"  confirmed on: {confirmed(first)}"]
    lines += [f"  replay with: {replay_command(first, installs, folder)}"]
    lines += [f"  the same root breaks {other.law}: {replay_command(other, installs, folder)}" for other in others]
    return "\n".join(lines)


def _cause(finding: Finding) -> str:
    """What is said of the cause, and where it can be had; "" where it was looked for and none was found."""
    if finding.cause:
        return f"probably: {finding.cause}"
    return "" if finding.engine.startswith("simulated") else _ON_SIMULATED


def confirmed(finding: Finding) -> str:
    """The real ranks that break the law too, or that none was tried or none does, and why."""
    on = ", ".join(finding.confirmed_on) or {"no": "none"}.get(finding.confirmed, finding.confirmed)
    return on + (f" ({finding.note})" if finding.note else "")


def avoidable(finding: Finding) -> str:
    """The trait that all cases have which break the law, and no other; "" where none is known."""
    said = re.search(r"^only cases with (\S+) fail", finding.when, re.MULTILINE)
    return said[1] if said is not None and said[1] in get_args(Trait) else ""


def alike(finding: Finding) -> str:
    """How many cases were set aside because they fail like this one; "" for none."""
    told = f"{finding.alike} further cases of this law fail so; what else is wrong in them shows when this is mended"
    return told if finding.alike else ""


def replay_command(finding: Finding, installs: Iterable[str] = (), folder: str = "") -> str:
    """The command that runs the finding's case again, in any folder of the machine; ``folder``: see ``render``."""
    return command(finding.token, canonical(finding.adapter, folder), installs, [finding.laws])


def troubles(verdicts: Iterable[Verdict]) -> list[str]:
    """Verdicts that are errors or ran no case, in words: each root once, with the laws that met it."""
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.root, []).append(verdict)
    return [_trouble(group) for group in groups.values()]


def trouble(verdict: Verdict) -> str:
    """A verdict that is an error or ran no case, in words."""
    return _trouble([verdict])


def _trouble(group: list[Verdict]) -> str:
    first, *others = group
    head = f"{first.status.upper()}: {first.law} on {first.adapter}"
    more = f"\n  the same of {len(others)} other laws: {', '.join(other.law for other in others)}" if others else ""
    return f"{head}\n{textwrap.indent(first.reason, '  ')}{more}"


def _entry(name: str, text: str) -> list[str]:
    return list(_indented(f"{name:<9} ", text))


def _indented(label: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines() or [""]):
        yield f"  {label if number == 0 else ' ' * len(label)}{line}"
