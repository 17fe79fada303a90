"""How many bytes a rank holds, by formula, before anything is allocated: also for a model on the meta device.

Legend: W ranks that shard, n elements of a unit's trainable (or frozen) parameters, e bytes an element.

| what               | flat buffers                     | per parameter (``fully_shard``)                        |
|--------------------|----------------------------------|--------------------------------------------------------|
| parameters         | e ceil(n / W) a unit             | e * rows owned * width, a parameter                    |
| padding (in it)    | the last ranks' share of W s - n | none that persists                                     |
| gradients          | as the trainable parameters      | as the trainable parameters                            |
| optimizer state    | ``states`` times the same        | ``states`` times the same                              |
| unsharded, at peak | root + the largest inner unit    | root + the two largest neighbours (one is prefetched)  |

With ``reshard_after_forward`` off everything is unsharded at the end of the forward. Kept for bookkeeping: activations
and backprops of the layers with trainable parameters, for one micro-batch.

Source: ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054, section 3; checked against live tensors in tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..sharding.parameter_slots import by_unit, parameter_at, shared_slots
from ..sharding.row_layout import RowLayout


@dataclass(frozen=True)
class Account:
    """Bytes on one rank. ``padding`` is part of ``parameters`` and of what is sized like them."""

    parameters: int
    padding: int
    gradients: int
    optimizer_state: int
    peak_unsharded: int

    @property
    def persistent(self) -> int:
        """What is held between steps: parameters and optimizer state."""
        return self.parameters + self.optimizer_state


@dataclass(frozen=True)
class UnitBytes:
    """One unit: bytes of this rank's shards, of the padding in them, and of the gathered whole."""

    trainable: int
    frozen: int
    padding: int
    gathered: int


def flat_account(
    module: nn.Module,
    unit_names: Sequence[str],
    world_size: int,
    rank: int = 0,
    *,
    states: int = 0,
    reshard_after_forward: bool = True,
) -> Account:
    """Bytes with flat buffers (``wrap.ShardedModel``). ``states``: tensors an optimizer keeps per parameter, Adam 2."""
    units = [_flat_unit(*kinds, world_size, rank) for kinds in _kinds(module, unit_names)]
    return _account(units, states, _flat_peak(units, world_size, reshard_after_forward))


def per_parameter_account(
    module: nn.Module,
    unit_names: Sequence[str],
    world_size: int,
    rank: int = 0,
    *,
    states: int = 0,
    reshard_after_forward: bool = True,
) -> Account:
    """Bytes with ``per_parameter.PerParameterModel``."""
    units = [
        UnitBytes(_rows(trainable, world_size, rank), _rows(frozen, world_size, rank), 0, _whole(trainable + frozen))
        for trainable, frozen in _kinds(module, unit_names)
    ]
    return _account(units, states, _neighbours_peak(units, reshard_after_forward))


def kept_for_bookkeeping(outputs: Iterable[torch.Size], inputs: Iterable[torch.Size], itemsize: int) -> int:
    """Bytes of activations and backprops kept for one micro-batch, from the shapes at the layers with parameters."""
    return itemsize * (sum(shape.numel() for shape in outputs) + sum(shape.numel() for shape in inputs))


def _account(units: Sequence[UnitBytes], states: int, peak: int) -> Account:
    trainable = sum(unit.trainable for unit in units)
    return Account(
        parameters=trainable + sum(unit.frozen for unit in units),
        padding=sum(unit.padding for unit in units),
        gradients=trainable,
        optimizer_state=states * trainable,
        peak_unsharded=peak,
    )


def _kinds(module: nn.Module, unit_names: Sequence[str]) -> list[tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """(trainable, frozen) parameters of the root and of each unit, in forward order."""
    places = shared_slots(module)
    found = []
    for positions in by_unit(module, unit_names, places).values():
        own = [parameter_at(places[position][0]) for position in positions]
        found.append(([p for p in own if p.requires_grad], [p for p in own if not p.requires_grad]))
    return found


def _flat_unit(
    trainable: Sequence[nn.Parameter], frozen: Sequence[nn.Parameter], world_size: int, rank: int
) -> UnitBytes:
    shards, padding = [], 0
    for parameters in (trainable, frozen):
        numel = sum(parameter.numel() for parameter in parameters)
        size = parameters[0].element_size() if parameters else 0
        shard = -(-numel // world_size)
        shards.append(shard * size)
        padding += (shard - min(max(numel - rank * shard, 0), shard)) * size
    return UnitBytes(shards[0], shards[1], padding, sum(shards) * world_size)


def _flat_peak(units: Sequence[UnitBytes], world_size: int, reshard_after_forward: bool) -> int:
    """The root's and one inner unit's; with one rank the shard is the whole, and nothing is added."""
    if world_size == 1:
        return 0
    root, inner = units[0].gathered, [unit.gathered for unit in units[1:]]
    return root + (max(inner, default=0) if reshard_after_forward else sum(inner))


def _neighbours_peak(units: Sequence[UnitBytes], reshard_after_forward: bool) -> int:
    """The root's and that of two inner units that follow one another, or of all."""
    root, inner = units[0].gathered, [unit.gathered for unit in units[1:]]
    if not reshard_after_forward:
        return root + sum(inner)
    return root + max((sum(inner[i : i + 2]) for i in range(len(inner))), default=0)


def _rows(parameters: Sequence[nn.Parameter], world_size: int, rank: int) -> int:
    layout = RowLayout([parameter.shape for parameter in parameters], world_size)
    parts = (layout.elements(position, rank) for position in range(len(parameters)))
    return sum((part.stop - part.start) * p.element_size() for part, p in zip(parts, parameters, strict=True))


def _whole(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
