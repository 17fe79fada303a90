"""``fsdpcheck list``: what there is."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from fsdpcheck import adapters, engines
from fsdpcheck.adapters.vocabulary import MOMENTS, PROMISES, PromiseRow
from fsdpcheck.case.vocabulary import TRAITS, Trait
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import AdapterError
from fsdpcheck.errors.excerpt import visible
from fsdpcheck.report.columns import filled, fitted, hanging

if TYPE_CHECKING:
    from fsdpcheck.judging.law import Law


def text(what: str, width: int = 0) -> str:
    """The list of adapters, laws, ..., no line longer than ``width`` if that is not 0."""
    return _LISTS[what](width)


def overview(width: int = 0) -> str:
    """The names of all that there is; of the most numerous how many there are."""
    from fsdpcheck.findings import faults
    from fsdpcheck.judging import registry

    laws, planted = registry.chapters(), faults.faults()
    chapters = Counter(name.partition(".")[0] for name in laws)
    rows = {
        f"adapters ({len(adapters.names())})": ", ".join(adapters.names()),
        f"laws ({len(laws)})": ", ".join(f"{chapter}.* {many}" for chapter, many in chapters.items()),
        f"promises ({len(PROMISES)})": ", ".join(PROMISES),
        f"faults ({len(planted)})": "planted in the reference, to see that laws find them",
        f"engines ({len(engines.names())})": ", ".join(engines.names()),
        f"traits ({len(TRAITS)})": ", ".join(TRAITS),
    }
    lines = [hanging(f"{name:<14}  ", told, width) for name, told in rows.items()]
    then = "fsdpcheck list adapters, laws, ... for a line each; fsdpcheck list laws 'norms.*' in full"
    return "\n".join([*lines, hanging("next: ", then, width)])


def statements(globs: tuple[str, ...], width: int = 0) -> str:
    """The whole statement of each law that any of ``globs`` matches, and what it asks of an adapter.

    No line is longer than ``width`` if that is not 0. Raises UsageError for a glob that no law matches.
    """
    from fsdpcheck.session import run

    return "\n\n".join(_statement(found, width) for found in run.chosen_laws(globs))


def _statement(found: Law, width: int) -> str:
    always = (f"{label} (always)" for label in found.space.vacuous_without)
    asked = {
        "promises": ", ".join((found.promise, *sorted(found.needs_promises))),
        "observables": ", ".join(sorted(found.observe)),
        "traits": ", ".join(sorted(found.needs_traits)) or "none",
        "ranks": f"{found.fewest} or more",
        "must occur": "; ".join((*always, *found.space.must_occur)) or "-",
        "cases": found.space.describe(),
    }
    room = max(width - 2, 1) if width else 0
    rows = (hanging(f"{name:<11}  ", value, room) for name, value in asked.items())
    return f"{found.name}\n" + textwrap.indent("\n".join((*rows, "", filled(found.statement.strip(), room))), "  ")


def _adapters(width: int) -> str:
    lines = []
    for name in adapters.names():
        lines += [hanging(f"{name:<17} ", _made(name), width), *_variants(name, width)]
    return "\n".join(lines)


def _variants(name: str, width: int) -> list[str]:
    try:
        return [hanging(f"  {ref}: ", words, width) for ref, words in adapters.variants(name).items()]
    except AdapterError:  # as the line above says
        return []


def _made(name: str) -> str:
    try:
        features = adapters.features(name)
    except AdapterError as error:
        return visible(f"cannot be loaded: {error}")
    return f"promises {', '.join(sorted(features.promises)) or 'nothing'}"


def _laws(width: int) -> str:
    from fsdpcheck.judging import registry

    rows = [
        (found.name, ", ".join((found.promise, *sorted(found.needs_promises))), found.guarantee)
        for found in registry.chapters().values()
    ]
    return fitted([("law", "promise", "guarantee"), *rows], width) if rows else "none"


def _promises(width: int) -> str:
    from fsdpcheck.judging import registry

    laws = registry.chapters().values()
    resting = Counter(name for law in laws for name in {law.promise, *law.needs_promises})
    rows = [(name, str(resting[name]), _needs(row), row.meaning) for name, row in PROMISES.items()]
    return fitted([("promise", "laws", "needs", "what the implementation guarantees"), *rows], width)


def _needs(row: PromiseRow) -> str:
    """What a promise says nothing without, in words."""
    methods = (f"Adapter.{name}" for name in row.adapter)
    moments = () if not row.moments else ("all moments",) if len(row.moments) == len(MOMENTS) else row.moments
    return ", ".join((*row.promises, *methods, *moments)) or "-"


def _faults(width: int) -> str:
    from fsdpcheck.findings import faults

    rows = [(name, fault.caught_by, fault.plants) for name, fault in sorted(faults.faults().items())]
    return fitted([("fault", "caught by", "what it plants"), *rows], width) if rows else "none"


def _engines(width: int) -> str:
    rows = [(name, metal.of(name).words, _here(name)) for name in engines.names()]
    return fitted([("engine", "ranks speak over", "here"), *rows], width)


def _here(name: str) -> str:
    """Whether this machine has such ranks, or why not."""
    return "under torchrun" if name in metal.LAUNCHED else metal.of(name).lacks() or "yes"


def _traits(width: int) -> str:
    accepted = {name: _accepted(name) for name in adapters.names()}
    head = ("trait", "what it is", "needs", "accepted by")
    rows = [
        (trait, row.meaning, ", ".join(row.needs) or "-", ", ".join(n for n in accepted if trait in accepted[n]) or "-")
        for trait, row in TRAITS.items()
    ]
    return fitted([head, *rows], width)


def _accepted(name: str) -> frozenset[Trait]:
    """What an adapter accepts; nothing if what it needs is not installed, which the list of adapters says."""
    try:
        return adapters.features(name).accepts
    except AdapterError:
        return frozenset()


_LISTS: dict[str, Callable[[int], str]] = {
    "adapters": _adapters,
    "laws": _laws,
    "promises": _promises,
    "faults": _faults,
    "engines": _engines,
    "traits": _traits,
}
