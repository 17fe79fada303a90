"""Observers that the laws use: importable functions called at named moments inside each rank (see program.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdpcheck.adapters._base import Shard, UnitState
from fsdpcheck.errors import AdapterError

PADDING = "fsdpcheck.observers:padding"
ORDERED_NORMS = "fsdpcheck.observers:ordered_norms"
POISON_PADDING = "fsdpcheck.observers:poison_padding"
SCRIBBLED = "fsdpcheck.observers:scribbled"
UNITS = "fsdpcheck.observers:units"
HELD = "fsdpcheck.observers:held"

_WITH_GRADIENTS = ("after_reduce", "before_step")
_OF_PADDING = ("after_init", *_WITH_GRADIENTS, "after_step")


def padding(moment: str, trainer: Any, rank: int) -> dict[str, Tensor] | None:
    """Copies of all padding, by shard name, at the four moments at which it is promised to be zero.

    A rank without padding gives empty slices, so a law can tell "none" from "not looked". Raises AdapterError where
    gradients are not shown.
    """
    if moment not in _OF_PADDING:
        return None
    return {shard.name: shard.data[shard.padding].clone() for shard in _with_gradients(moment, trainer.shards(), rank)}


def poison_padding(moment: str, trainer: Any, rank: int) -> int | None:
    """Writes NaN into all padding before everything that has no business with it: forward, clipping, the optimizer.

    Into how many elements. Raises AdapterError where gradients are not shown.
    """
    if moment not in _OF_PADDING:
        return None
    shards = _with_gradients(moment, trainer.shards(), rank)
    with torch.no_grad():
        for shard in shards:
            shard.data[shard.padding] = float("nan")
    return sum(int(shard.data[shard.padding].numel()) for shard in shards)


def _with_gradients(moment: str, shards: list[Shard], rank: int) -> list[Shard]:
    """The shards; where gradients are reduced, that of everything that is trained has to be among them."""
    trained, gradients = (
        sorted(shard.data.numel() for shard in shards if shard.holds == what) for what in ("trained", "gradient")
    )
    if moment in _WITH_GRADIENTS and trained != gradients:
        raise AdapterError(
            "the trainer does not show the gradient of every shard that is trained, at whose padding laws look\n"
            f"  got     gradients of {gradients} elements, from shards()\n"
            f"  wanted  of {trained} elements, as the shards that are trained have\n"
            f"  where   at {moment}, rank {rank}\n"
            "  next    show each reduced gradient as Shard(..., holds='gradient') and what is frozen as"
            " holds='frozen', or take the promises padding.* away"
        )
    return shards


def units(moment: str, trainer: Any, rank: int) -> list[UnitState]:
    """What every unit holds, at every moment that is announced."""
    return list(trainer.units())


def held(moment: str, trainer: Any, rank: int) -> list[Tensor] | None:
    """Copies of the local tensors that the optimizer updates, after construction and after each step."""
    if moment not in ("after_init", "after_step"):
        return None
    return [tensor.detach().to("cpu", copy=True) for tensor in trainer.local_tensors()]


def scribbled(moment: str, trainer: Any, rank: int) -> list[str] | None:
    """After each step, names of what the trainer shows otherwise once NaN is written into all it has shown before."""
    if moment != "after_step":
        return None
    methods = [name for name in ("parameters", "gradients") if callable(getattr(trainer, name, None))]
    given = {method: getattr(trainer, method)() for method in methods}
    before = {method: {name: value.detach().clone() for name, value in given[method].items()} for method in methods}
    with torch.no_grad():
        for shown in given.values():
            for value in shown.values():
                value.fill_(float("nan"))
    again = {method: getattr(trainer, method)() for method in methods}
    pairs = [(method, name, value) for method in methods for name, value in before[method].items()]
    return [f"{method}()[{name!r}]" for method, name, value in pairs if not torch.equal(again[method][name], value)]


def ordered_norms(moment: str, trainer: Any, rank: int) -> dict[str, Tensor] | None:
    """After each step, the norms of the whole logical batch by global sample index, as this rank reports them."""
    return trainer.ordered_norms() if moment == "after_step" else None
