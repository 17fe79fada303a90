"""What Python's import system keeps private: the locks of modules that are being imported."""

from __future__ import annotations

import importlib
from typing import Any


def locks() -> dict[str, Any]:
    """By name, the locks of modules that are being imported. Tried: Python 3.11; read in 3.12 and 3.13."""
    found: dict[str, Any] = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
    return found


def set_locks(those: dict[str, Any]) -> None:
    """Put others in place of ``locks()``. Whoever imports now still has a reference to its own."""
    importlib._bootstrap._module_locks = those  # type: ignore[attr-defined]
