"""Sharding: which checks of a session one of several machines has, decided by the plan alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fsdpcheck.errors import UsageError
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.work_queue import Pair

MOST = 100_000
"""Shards of a session, and blocks."""


def parse(text: str) -> tuple[int, int]:
    """(3, 8) from "3/8". Raises UsageError naming what is wrong."""
    found = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if found is None:
        raise UsageError(f"shard {text!r}: wanted NUMBER/HOW-MANY, such as 3/8")
    number, many = int(found[1]), int(found[2])
    if not 1 <= number <= many <= MOST:
        raise UsageError(f"shard {text!r}: wanted 1 <= number <= how many <= {MOST}, got {number} of {many}")
    return number, many


def elsewhere(plan: Plan, laws: Iterable[str], spaces: Mapping[str, str]) -> frozenset[Pair]:
    """The (law, adapter) of ``plan`` that its other shards judge.

    Laws of one space stay together, for they share executions. The seed moves them on, so that over several blocks
    every shard has some of each.
    """
    number, many = plan.shard
    if many == 1:
        return frozenset()
    known = tuple(laws)
    groups: dict[tuple[str, str], list[Pair]] = {}
    for adapter in plan.adapters:
        for law in known:
            groups.setdefault((adapter, spaces[law]), []).append((law, adapter))
    others = (pairs for place, pairs in enumerate(groups.values()) if (place + plan.seed) % many != number - 1)
    return frozenset(pair for pairs in others for pair in pairs)
