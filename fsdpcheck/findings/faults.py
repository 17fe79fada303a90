"""Planted: the bugs of fsdpcheck.impl that can be switched on, and what ``--install NAME`` means.

``fsdpcheck.impl`` is reached by dotted name, like any other implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fsdpcheck.errors import UsageError, spelling
from fsdpcheck.findings.tokens import FAULTS


def faults() -> Mapping[str, Any]:
    """Every planted fault by name (see impl/faults/_fault.py)."""
    registry: Mapping[str, Any] = importlib.import_module(FAULTS.rstrip(":")).ALL
    return registry


def resolved(name: str) -> str:
    """The dotted name that ``--install name`` stands for: a fault's, or ``name`` itself when it is "pkg.mod:attr".

    Raises UsageError for a name that is no fault, also as "fsdpcheck.impl.faults:name".
    """
    if ":" in name and not name.startswith(FAULTS):
        return name
    name, known = name.removeprefix(FAULTS), faults()
    if name in known:
        return FAULTS + name
    hint = spelling.hint(name, known)
    raise UsageError(f"unknown fault {name!r}.{hint} `fsdpcheck list faults` shows all; your own is pkg.mod:attr")
