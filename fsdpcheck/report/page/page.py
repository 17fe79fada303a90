"""The page: one HTML file of kept sessions, with its style and script in it, and nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from fsdpcheck import __version__
from fsdpcheck.errors.excerpt import shown
from fsdpcheck.report.document_reader import Power
from fsdpcheck.report.page import plots, view
from fsdpcheck.session.ledger import Ledger

_TEMPLATES = ("page.html.jinja", "parts.html.jinja", "faults.html.jinja")
_SHORT = 400
"""Characters of two values up to which the part in which they differ is marked."""


def text(sessions: Sequence[Ledger], root: str = "", power: Power | None = None) -> str:
    """The page of the last of ``sessions``, with the others as its history.

    Whatever an adapter says is escaped by the template, and no script but the page's own would run: its policy names
    the hashes of script and style.
    """
    told = [shown(session) for session in sessions]
    newest = told[-1]
    style, script = read("page.css").replace("ADAPTERS", str(max(len(newest.plan.adapters), 1))), read("page.js")
    known = {
        "release": __version__,
        "style": style,
        "script": script,
        "policy": f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(script)}; base-uri 'none'",
        "head": view.head(newest),
        "findings": [*view.findings(newest, root)],
        "wrong": view.wrong(newest),
        "matrix": view.matrix(newest),
        "coverage": view.coverage(newest),
        "history": _history(told),
        "power": _power(power or {}),
        "limits": view.limits(newest),
        "apart": apart,
    }
    return environment().get_template(_TEMPLATES[0]).render(known)


def apart(got: str, wanted: str) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """(what both begin with, what differs, what both end with) of two values; long ones differ as a whole."""
    if "\n" in got + wanted or max(len(got), len(wanted)) > _SHORT:
        return ("", got, ""), ("", wanted, "")
    head = _alike(got, wanted)
    tail = min(_alike(got[::-1], wanted[::-1]), len(got) - head, len(wanted) - head)
    return _cut(got, head, tail), _cut(wanted, head, tail)


def _alike(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _cut(text: str, head: int, tail: int) -> tuple[str, str, str]:
    return text[:head], text[head : len(text) - tail], text[len(text) - tail :]


def _history(sessions: Sequence[Ledger]) -> dict[str, Any] | None:
    """None of one session."""
    if len(sessions) < 2:
        return None
    changed = [
        {"adapter": ref, "law": law, "looks": [(word, plots.KINDS[plots.kind(word)] if word else "") for word in words]}
        for ref, law, words in plots.changes(sessions)
    ]
    when = [session.began.replace("T", " ")[:16] for session in sessions]
    return {"picture": plots.history(sessions), "legend": plots.legend(), "changed": changed, "when": when}


def _power(power: Power) -> list[dict[str, Any]]:
    """For each adapter and family: the plot, and the share of each planted error that each judge finds."""
    found = []
    for adapter, judged in power.items():
        for (family, tier), group in groupby(judged, key=lambda one: (one.family, one.tier)):
            mine = [*group]
            rows = [
                {
                    "error": error.replace("_1e_", " 1e-").replace("_", " "),
                    "shares": [_share(one.errors, error) for one in mine],
                }
                for error in dict.fromkeys(name for one in mine for name in one.errors)
            ]
            named = {"adapter": adapter, "family": family, "tier": tier, "judges": [one.judge for one in mine]}
            alarms = [f"{one.alarms} of {one.honest}" for one in mine]
            found.append({**named, "picture": plots.power(mine), "rows": rows, "alarms": alarms})
    return found


def _share(errors: Mapping[str, Any], error: str) -> tuple[str, str]:
    """(share in per cent, its look); never rounded up to all or down to none."""
    one = errors.get(error)
    if one is None or not one.effective:
        return plots.NONE, "none"
    if one.found in (0, one.effective):
        return ("100 %", "good") if one.found else ("0 %", "bad")
    return f"{min(max(100 * one.found / one.effective, 0.1), 99.9):.1f} %", "odd"


def environment() -> Environment:
    """With the templates of all pages; what they are given is escaped."""
    loader = DictLoader({name: read(name) for name in _TEMPLATES})
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["g"] = lambda value: value if isinstance(value, str) else f"{value:g}"
    made.filters["breaks"] = lambda text: Markup(re.sub(r"([:._/])", r"\1<wbr>", str(escape(text))))
    return made


def read(name: str) -> str:
    """A file of this folder."""
    return resources.files("fsdpcheck.report.page").joinpath(name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """As a content security policy names a style or a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
