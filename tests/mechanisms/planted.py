"""All mechanisms, by name. ``--install tests.mechanisms.planted:NAME`` plants one."""

from __future__ import annotations

from typing import Any

from tests.mechanisms import averaging, clipping, lifecycle, noise_and_samplers, sharding, state
from tests.mechanisms.planting import Mechanism

COLLECTIONS = [module.found for module in (averaging, clipping, noise_and_samplers, sharding, state, lifecycle)]
ALL: dict[str, Mechanism] = {name: m for collection in COLLECTIONS for name, m in collection.mechanisms.items()}


def __getattr__(name: str) -> Any:
    if name in ALL:
        return ALL[name]
    raise AttributeError(f"there is no mechanism {name!r}, there are {', '.join(ALL)}")
