"""Probes of what a trainer shows at named moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Shard, UnitState
from fsdpcheck.program.probe import Notes, probe

_WITH_GRADIENTS = ("after_reduce", "before_step")
_OF_PADDING = ("after_init", *_WITH_GRADIENTS, "after_step")


@dataclass(frozen=True)
class Missing:
    """Elements of the gradients and of the trained pieces that shards() showed, where they are not the same."""

    gradients: tuple[int, ...]
    trained: tuple[int, ...]


@probe(at=_OF_PADDING, calls="shards")
def padding(trainer: Any, notes: Notes) -> dict[str, Tensor] | Missing:
    """Copies of all padding, by shard name, at the four moments at which it is promised to be zero.

    A rank without padding gives empty slices, so a law can tell "none" from "not looked"; one that does not show the
    gradient of everything that is trained, where gradients are reduced, gives what is Missing.
    """
    shards = _present(trainer.shards())
    return _missing(notes.moment(), shards) or {shard.name: shard.data[shard.padding].clone() for shard in shards}


@probe(at=_OF_PADDING, calls="shards")
def poison_padding(trainer: Any, notes: Notes) -> int | Missing:
    """Writes NaN into all padding before everything that has no business with it: forward, clipping, the optimizer.

    Into how many elements; or what is Missing, as ``padding`` says.
    """
    shards = _present(trainer.shards())
    if missing := _missing(notes.moment(), shards):
        return missing
    with torch.no_grad():
        for shard in shards:
            shard.data[shard.padding] = float("nan")
    return sum(int(shard.data[shard.padding].numel()) for shard in shards)


def _present(shards: list[Shard]) -> list[Shard]:
    """Without gradients that are None."""
    return [shard for shard in shards if shard.data is not None]


def _missing(moment: str, shards: list[Shard]) -> Missing | None:
    """What is missing where gradients are reduced: of everything that is trained there has to be one."""
    if moment not in _WITH_GRADIENTS:
        return None
    trained, gradients = (
        sorted(shard.data.numel() for shard in shards if shard.holds == what) for what in ("trained", "gradient")
    )
    return None if trained == gradients else Missing(tuple(gradients), tuple(trained))


@probe(at=None, calls="units")
def units(trainer: Any, notes: Notes) -> list[UnitState]:
    """What every unit holds, at every moment that is announced."""
    return list(trainer.units())


@probe(at=("after_init", "after_step"), calls="local_tensors")
def local_tensors(trainer: Any, notes: Notes) -> list[Tensor]:
    """Copies of the local tensors that the optimizer updates, after construction and after each step."""
    return [tensor.detach().to("cpu", copy=True) for tensor in trainer.local_tensors()]


@probe(at=("after_step",))
def scribbled(trainer: Any, notes: Notes) -> list[str]:
    """After each step, names of what the trainer shows otherwise once NaN is written into all it has shown before."""
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


@probe()
def loss_kept(_: Any, notes: Notes) -> None:
    """Notes after each step the names of what the loss no longer has as it had when the implementation got it."""

    def watch(loss: nn.Module) -> None:
        given = _described(loss)

        def look(moment: str) -> None:
            now = _described(loss)
            if moment == "after_step":
                notes.add(sorted(name for name in given.keys() | now.keys() if given.get(name) != now.get(name)))

        notes.on_moment(look)

    notes.on_loss(watch)


def _described(loss: nn.Module) -> dict[str, str]:
    """Its attributes, in words; of what holds hooks, say, how many there are."""
    told = {name: f"{len(value)}" if isinstance(value, Mapping) else repr(value) for name, value in vars(loss).items()}
    return {**told, "__class__": type(loss).__qualname__}


@probe(at=("after_step",), calls="ordered_norms")
def ordered_norms(trainer: Any, notes: Notes) -> dict[str, Tensor]:
    """After each step, the norms of the whole logical batch by global sample index, as this rank reports them."""
    norms: dict[str, Tensor] = trainer.ordered_norms()
    return norms
