"""Ways of having ranks, one a file: ``<name>.py`` holds the class ``<Name>Engine``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpcheck.errors import UsageError, spelling

if TYPE_CHECKING:
    from fsdpcheck.engines.base import Engine


def names() -> tuple[str, ...]:
    """All engines, sorted: every module of this folder but the protocol and what starts with an underscore."""
    stems = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(sorted(stem for stem in stems if not stem.startswith("_") and stem != "base"))


def open_engine(name: str, budget_seconds: float | None = None) -> Engine:
    """A new engine, to be closed by the caller. ``budget_seconds`` limits one run (see base.py). Raises UsageError."""
    if name not in names():
        raise UsageError(f"unknown engine {name!r};{spelling.hint(name, names())} known: {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    engine: Engine = getattr(module, f"{name.title()}Engine")(budget_seconds=budget_seconds)
    return engine


def cover(folder: str, law: str) -> None:
    """Measure which lines and branches of implementations run on simulated ranks (engines/_common/hosts.py)."""
    from fsdpcheck.engines._common import hosts

    hosts.cover(folder, law)


def uncover() -> None:
    """Measure that no longer."""
    from fsdpcheck.engines._common import hosts

    hosts.uncover()
