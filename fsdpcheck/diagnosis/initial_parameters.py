"""Causes of a training that does not start from rank 0's model and buffers, where every rank has built other ones.

No two ranks have built an element alike, so of each wrong value it can be told whose it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis.bits import rounded, words
from fsdpcheck.diagnosis.cause_fit import differs
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.oracle import Named
from fsdpcheck.workload import models


def of_start(case: TrainingCase, built: Sequence[Named], shown: Sequence[Named]) -> Causes | None:
    """Causes of what ranks show before the first step (``shown``, by rank), if not all is what rank 0 has built."""
    wrong = [_builders(built, own) for own in shown]
    if any(not ranks for own in wrong for ranks in own.values()):
        return []  # values that no rank has built
    if (other := _same_for_all(built, shown)) is not None:
        return [Cause("another rank's", f"all ranks start from what rank {other} has built, not from rank 0's")]
    names = {name for own in wrong for name in own}
    found = _of_units(case, names)
    if _only_later_replicas(case, wrong, models.parameter_shapes(case)):
        text = "replicas other than the first start from what their own ranks have built: rank 0's does not reach them"
        alone = [] if case.mesh.dp_shard > 1 else [cause for cause in found or () if cause.key == "ranks apart"]
        return [Cause("replicas apart", text), *alone]
    if found is None or names == built[0].keys():
        return found
    text = f"{', '.join(sorted(names))}: each rank keeps what it has built, rank 0's does not reach it"
    return [*found, Cause("parameters apart", text, PATTERN)]


def of_rounded_start(built: Named, shown: Named) -> Causes:
    """Causes of what a rank shows before the first step, if it is what was built, rounded to some type's bits."""
    if shown.keys() != built.keys():
        return []
    wrong = differs(shown, built)
    for count in (8, 11):
        if all(torch.equal(shown[name], rounded(built[name], count)) for name in wrong):
            named = "all parameters" if len(wrong) == len(built) else ", ".join(sorted(wrong))
            text = f"{named} were {words(count)}, before they were sharded"
            return [Cause(f"rounded to {count}", text, PATTERN)]
    return []


def of_buffers(case: TrainingCase, built: Sequence[Named], used: Sequence[Named]) -> Causes | None:
    """Causes of the buffers that ranks compute with (``used``, by rank), if not all are what rank 0 has built."""
    if any(own.keys() != built[0].keys() for own in used):
        return None  # a rank shows some of them alone
    wrong = [_builders(built, own) for own in used]
    if (other := _same_for_all(built, used)) is not None:
        return [Cause("another rank's", f"all ranks compute with the buffers of rank {other}, not with rank 0's")]
    found: list[Cause] = []
    if _only_later_replicas(case, wrong, built[0]):
        text = "replicas other than the first compute with buffers of their own ranks: rank 0's do not reach them"
        found.append(Cause("replicas apart", text))
    if all(builders == {rank} for rank, own in enumerate(wrong) for builders in own.values()):
        names = sorted({name for own in wrong for name in own})
        text = f"{', '.join(names)}: each rank keeps the buffer that it has built, rank 0's does not reach it"
        found.append(Cause("buffers apart", text))
    return found


def _of_units(case: TrainingCase, wrong: set[str]) -> Causes | None:
    """Which units are not broadcast: all, or some. None if the case cannot tell: a unit may lie on rank 0 alone."""
    if case.model.tied is not None:
        return None  # a tied parameter may belong to another unit than its name says
    by_unit: dict[str, list[str]] = {}
    shapes = models.parameter_shapes(case)
    for name in shapes:
        inner = (unit for names in models.unit_names(case) for unit in names if name.startswith(f"{unit}."))
        by_unit.setdefault(next(inner, "(root)"), []).append(name)
    kept = {unit for unit, names in by_unit.items() if wrong & {*names}}
    if kept == by_unit.keys():
        return [Cause("ranks apart", "each rank keeps what it has built: nothing is broadcast from rank 0")]
    rows = {unit: max(math.prod(shapes[name][:1]) for name in names) for unit, names in by_unit.items()}
    if case.mesh.dp_shard > 1 and any(rows[unit] < 2 for unit in rows.keys() - kept):
        return None
    text = f"{', '.join(sorted(kept))}: each rank keeps what it has built, and only the rest is broadcast from rank 0"
    return [Cause("units apart", text)]


def _builders(built: Sequence[Named], shown: Mapping[str, Tensor]) -> dict[str, set[int]]:
    """By name of a parameter that is not rank 0's: who has built the wrong elements; nobody if one is unknown."""
    found = {}
    for name in differs(shown, built[0]):
        wrong = shown[name] != built[0][name]
        by_rank = torch.stack([(shown[name] == own[name])[wrong] for own in built])
        known = {rank for rank, own in enumerate(by_rank) if bool(own.any())}
        found[name] = known if bool(by_rank.any(0).all()) else set()
    return found


def _same_for_all(built: Sequence[Named], shown: Sequence[Named]) -> int | None:
    """The rank other than 0 whose whole model all ranks show."""
    ranks = (rank for rank in range(1, len(built)) if all(not differs(own, built[rank]) for own in shown))
    return next(ranks, None)


def _only_later_replicas(
    case: TrainingCase, wrong: Sequence[Mapping[str, set[int]]], every: Mapping[str, object]
) -> bool:
    """Whether all of ``every`` is wrong in all replicas but the first, each by what its own ranks have built."""
    size, at = case.mesh.dp_shard, [rank for rank, own in enumerate(wrong) if own]
    inside = all(other // size == rank // size for rank in at for ranks in wrong[rank].values() for other in ranks)
    whole = all(wrong[rank].keys() == every.keys() for rank in at)
    return case.mesh.dp_replicate > 1 and at == list(range(size, len(wrong))) and inside and whole
