"""Every planted bug, by name: ``faults.ALL``, ``faults.install(name)``, or ``fsdpcheck.impl.faults:NAME`` in a request.

The bugs themselves stand by theme in the files beside this one, which are found by scanning; to add a bug, add a
function to one of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import AbstractContextManager

from ._fault import Fault


def _collect() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for info in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{info.name}")).values():
            if isinstance(value, Fault) and found.setdefault(value.name, value) is not value:
                raise RuntimeError(f"two faults are named {value.name!r}")
    return found


ALL: dict[str, Fault] = _collect()


def install(name: str) -> AbstractContextManager[Fault]:
    """The named fault, in place for the length of a ``with`` block. Raises KeyError for an unknown name."""
    return ALL[name]()


def __getattr__(name: str) -> Fault:
    try:
        return ALL[name]
    except KeyError:
        raise AttributeError(f"no fault is named {name!r}; there are {', '.join(ALL)}") from None
