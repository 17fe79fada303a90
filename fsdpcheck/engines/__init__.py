"""Ways of having ranks, one a file: ``<name>.py`` holds the class ``<Name>Engine``; kinds: _common/metal.py."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fsdpcheck.engines._common import metal
from fsdpcheck.errors import UsageError, spelling

if TYPE_CHECKING:
    from fsdpcheck.engines.base import Engine


def names() -> tuple[str, ...]:
    """All kinds of ranks, those of torchrun as one."""
    return (*metal.KINDS, next(iter(metal.LAUNCHED)))


def open_engine(kind: str, budget_seconds: float | None = None) -> Engine:
    """A new engine of a kind of ``metal.KINDS``, to be closed by the caller. ``budget_seconds`` limits one run.

    Raises UsageError for a kind that there is not, and for one that this machine cannot have.
    """
    if kind not in metal.KINDS:
        known = tuple(metal.KINDS)
        raise UsageError(f"unknown engine {kind!r};{spelling.hint(kind, known)} known: {', '.join(known)}")
    name, wanted = metal.KINDS[kind].engine, metal.KINDS[kind].metal
    metal.require(wanted)
    module = importlib.import_module(f"{__name__}.{name}")
    engine: Engine = getattr(module, f"{name.title()}Engine")(metal=wanted, budget_seconds=budget_seconds)
    return engine


def cover(folder: str, law: str) -> None:
    """Measure which lines and branches of implementations run on simulated ranks (engines/_common/hosts.py)."""
    from fsdpcheck.engines._common import hosts

    hosts.cover(folder, law)


def uncover() -> None:
    """Measure that no longer."""
    from fsdpcheck.engines._common import hosts

    hosts.uncover()
