"""``fsdpcheck list``: what there is."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, get_args

from fsdpcheck import adapters, engines
from fsdpcheck.case import Trait
from fsdpcheck.case.trait_words import MEANINGS
from fsdpcheck.errors import AdapterError
from fsdpcheck.errors.excerpt import visible
from fsdpcheck.report.colour import Paint
from fsdpcheck.report.table import aligned

if TYPE_CHECKING:
    from fsdpcheck.judging.law import Law


def text(what: str, heading: bool) -> str:
    """The list of adapters, laws, faults, engines or traits; ``heading`` puts its name above it."""
    lines = {"adapters": _adapters, "laws": _laws, "faults": _faults, "engines": _engines, "traits": _traits}[what]()
    return f"{what}:\n{lines}" if heading else lines


def statements(globs: tuple[str, ...]) -> str:
    """The whole statement of each law that any of ``globs`` matches, and what it asks of an adapter.

    Raises UsageError for a glob that no law matches.
    """
    from fsdpcheck.session import run

    return "\n\n".join(_statement(found) for found in run.chosen_laws(globs))


def _statement(found: Law) -> str:
    always = (f"{label} (always)" for label in found.space.vacuous_without)
    asked = {
        "promises": ", ".join((found.promise, *sorted(found.needs_promises))),
        "observables": ", ".join(sorted(found.observe)),
        "traits": ", ".join(sorted(found.needs_traits)) or "none",
        "ranks": f"{found.fewest} or more",
        "must occur": "; ".join((*always, *found.space.must_occur)) or "-",
        "cases": found.space.describe(),
    }
    lines = (*(f"{name:<11}  {value}" for name, value in asked.items()), "", found.statement.strip())
    return f"{found.name}\n" + textwrap.indent("\n".join(lines), "  ")


def _adapters() -> str:
    lines = []
    for name in adapters.names():
        lines += [f"{name:<14} {_promises(name)}", *_variants(name)]
    return "\n".join(lines)


def _variants(name: str) -> list[str]:
    try:
        return [f"  {ref}: {words}" for ref, words in adapters.variants(name).items()]
    except AdapterError:  # as the line above says
        return []


def _promises(name: str) -> str:
    try:
        features = adapters.features(name)
    except AdapterError as error:
        return visible(f"cannot be loaded: {error}")
    return f"promises {', '.join(sorted(features.promises)) or 'nothing'}"


def _laws() -> str:
    from fsdpcheck.judging import registry

    rows = [
        (found.name, ", ".join((found.promise, *sorted(found.needs_promises))), found.guarantee)
        for found in registry.chapters().values()
    ]
    return _columns([("law", "promise", "guarantee"), *rows]) if rows else "none"


def _faults() -> str:
    from fsdpcheck.session import faults

    rows = [(name, fault.caught_by, fault.plants) for name, fault in sorted(faults.faults().items())]
    return _columns([("fault", "caught by", "what it plants"), *rows]) if rows else "none"


def _engines() -> str:
    return "\n".join(engines.names())


def _traits() -> str:
    accepted = {name: _accepted(name) for name in adapters.names()}
    rows = [(trait, ", ".join(n for n, traits in accepted.items() if trait in traits)) for trait in get_args(Trait)]
    head = ("trait", "what it is", "accepted by")
    return _columns([head, *((trait, MEANINGS[trait], names or "-") for trait, names in rows)])


def _accepted(name: str) -> frozenset[Trait]:
    """What an adapter accepts; nothing if what it needs is not installed, which the list of adapters says."""
    try:
        return adapters.features(name).accepts
    except AdapterError:
        return frozenset()


def _columns(rows: list[tuple[str, ...]]) -> str:
    no_paint: Paint = lambda text, colour: text  # noqa: E731
    return aligned(rows, no_paint)
