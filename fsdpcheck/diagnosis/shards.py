"""Causes in shards: who owns which element, and what follows when one owner alone goes wrong.

Two ways of sharding are tried: *flat*, a unit's parameters end to end in one buffer cut into equal shards, and *rows*,
each parameter cut along its first axis. Legend: S shards (W ranks, less replicas), n elements or samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload import models
from fsdpcheck.workload.clip_groups import is_instrument

ROOT = "(root)"


def units(case: TrainingCase, names: list[str]) -> dict[str, list[str]]:
    """Parameters of ``names`` by sharding unit, in their order; what is tied across units is the root's."""
    found: dict[str, list[str]] = {}
    if case.model.own is not None:
        for name in names:
            unit = next((unit for unit in case.model.own.units if name.startswith(f"model.{unit}.")), ROOT)
            found.setdefault(unit, []).append(name)
        return found
    at_root = {
        f"{layer.tied_to}.weight"
        for layer in models.layer_names(case)
        if layer.tied_to and layer.tied_to.split(".")[:2] != layer.name.split(".")[:2]
    }
    for name in names:
        own = name.startswith("units.") and name not in at_root
        found.setdefault(".".join(name.split(".")[:2]) if own else ROOT, []).append(name)
    return found


def buffers(case: TrainingCase, names: list[str], trained: Collection[str] | None) -> list[list[str]]:
    """Parameters by flat buffer: a unit's trained ones, and its frozen ones."""
    kinds = [names] if trained is None else [[n for n in names if n in trained], [n for n in names if n not in trained]]
    return [own for kind in kinds for own in units(case, kind).values()]


def owners(case: TrainingCase, like: Mapping[str, Tensor], trained: Collection[str] | None = None) -> Iterator[Named]:
    """The shard that owns each element of ``like``, int64 of equal shape, for each way of sharding.

    Frozen parameters (not among ``trained``; None: there are none) have flat buffers of their own.
    """
    count = case.mesh.dp_shard
    flat: Named = {}
    for names in buffers(case, list(like), trained):
        total = sum(like[name].numel() for name in names)
        ids = torch.arange(total) // -(-max(total, 1) // count)
        pieces = torch.split(ids, [like[name].numel() for name in names])
        flat.update({name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)})
    yield {name: flat[name] for name in like}
    by_row = {}
    for name, value in like.items():
        ids = torch.arange(len(value)) // -(-max(len(value), 1) // count)
        by_row[name] = ids.view(-1, *[1] * (value.dim() - 1)).expand(value.shape)
    yield by_row


def own_squares(answer: Answer, step: int, rank: int) -> Iterator[tuple[Cause, Tensor]]:
    """Squared norms [n] that a rank gets from its own shard alone, or from shards that end one element too early."""
    case, gradients = answer.case, answer.steps[step].gradients
    if case.mesh.dp_shard == 1:
        return  # the own shard is the whole
    inner = {name for unit, names in units(case, list(gradients)).items() for name in names if unit != ROOT}
    one = {name: value[0] for name, value in gradients.items() if len(value)}
    for owner in owners(case, one) if one else ():
        mine = {name: own == rank % case.mesh.dp_shard for name, own in owner.items()}
        text = f"it is the norm of the own shard of rank {rank} alone: not summed over the ranks"
        yield Cause("own shard", text), _masked(gradients, mine)
        text = "the last element of each rank's piece of a parameter is left out of the norm"
        yield Cause("last element of a shard", text), _masked(gradients, _without_ends(owner))
        short = {n: own if n in inner else torch.ones_like(own) for n, own in _without_ends(owner).items()}
        yield Cause("last element of a shard", text), _masked(gradients, short)


def unreduced(case: TrainingCase, local: list[Named], right: Named) -> Iterator[tuple[Cause, Named]]:
    """Gradients when one unit's, or all, stay local: each shard of ``right`` is what its owner's own samples add to it.

    ``local``: what those of each rank add.
    """
    if case.world_size == 1:
        return
    by_unit = units(case, list(right))
    by_unit |= {"every unit": list(right)} if len(by_unit) > 1 else {}
    for owner in owners(case, right):
        choices = itertools.product(by_unit.items(), (1, case.world_size), range(case.mesh.dp_replicate))
        for (unit, names), times, replica in choices:
            first = replica * case.mesh.dp_shard
            changed = {name: _owned([own[name] for own in local[first:]], owner[name]) * times for name in names}
            text = f"gradients of {unit} are not reduced over the ranks: each shard has its own rank's only"
            yield Cause(f"not reduced: {unit}", text), {**right, **changed}


def stood_still(case: TrainingCase, before: Named, after: Named, got: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Whether exactly one rank's shard did not move although the others did.

    ``after``: parameters that are trained, and no others.
    """
    count = case.mesh.dp_shard
    if count == 1:
        return
    body = [name for name in after if not is_instrument(name)]  # what moves in every shard says nothing of where
    wrong = {name: got[name] != value for name, value in after.items()}
    if not any(bool(mask.any()) for mask in wrong.values()):
        return
    for owner in owners(case, after):
        for shard in range(count):
            mine = {name: own == shard for name, own in owner.items()}
            others_move = any(bool((after[name] != before[name])[~mine[name]].any()) for name in body)
            if not others_move or any(bool((mask & ~mine[name]).any()) for name, mask in wrong.items()):
                continue  # where only this shard has anything to update, all that goes wrong goes wrong in it
            if all(bool((got[name] == before[name])[mine[name]].all()) for name in after):
                which = "the last rank" if shard == count - 1 else f"rank {shard}"
                yield Cause(f"stood still: {which}", f"the shard of {which} (rank {shard}) did not move")


def shifted(case: TrainingCase, right: Named, got: Mapping[str, Tensor], trained: Collection[str]) -> Iterator[Cause]:
    """Whether the parameters are those of shards that start at rank * floor(n / S), not rank * ceil(n / S)."""
    count = case.mesh.dp_shard
    differing = {name for name in right if bool((got[name] != right[name]).any())}
    for names in buffers(case, list(right), trained):
        if not differing.intersection(names):
            continue
        flat = torch.cat([right[name].flatten() for name in names])
        size = -(-len(flat) // count)
        padded = torch.cat([flat, flat.new_zeros(size * count - len(flat))])
        found = torch.cat([padded[s : s + size] for s in (r * (len(flat) // count) for r in range(count))])
        wrong = torch.cat([got[name].flatten() for name in names])
        if not torch.equal(found[: len(flat)], wrong):
            return
    if differing:
        where = ", ".join(units(case, [name for name in right if name in differing]))
        text = f"shards of {where} start at rank * floor(n / W) although they have ceil(n / W) elements"
        yield Cause("shard starts", text)


def _masked(gradients: Named, masks: Mapping[str, Tensor]) -> Tensor:
    """Squared norms [n] over the marked elements."""
    parts = [(value * masks[name]).flatten(1).square().sum(1) for name, value in gradients.items()]
    return torch.stack(parts).sum(0)


def _without_ends(owner: Named) -> Named:
    """Marks all but the last element of each owner's piece of each parameter."""
    kept = {}
    for name, own in owner.items():
        flat = own.flatten()
        last = torch.cat([flat[1:] != flat[:-1], torch.ones(min(len(flat), 1), dtype=torch.bool)])
        kept[name] = (~last).view(own.shape)
    return kept


def _owned(sums: list[Tensor], owner: Tensor) -> Tensor:
    """Each element from the sum of the rank that owns it."""
    return torch.stack(sums).gather(0, owner.clamp(max=len(sums) - 1).unsqueeze(0)).squeeze(0)
