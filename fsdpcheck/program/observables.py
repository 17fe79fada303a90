"""What a trainer shows of named tensors, as plain data: whole tensors, or this rank's pieces of those that are sharded.

A piece is taken without a word to other ranks, so showing adds no collective to what is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Adapter, Part
from fsdpcheck.case import MeshSpec
from fsdpcheck.compat import layouts_private
from fsdpcheck.compat.torch_private import is_dtensor
from fsdpcheck.errors import AdapterError, explain
from fsdpcheck.execution.pieces import NotPlaced, Pieces, Shown


class Showing:
    """Takes what one rank of a mesh shows, through a run."""

    def __init__(self, adapter: Adapter, mesh: MeshSpec, rank: int) -> None:
        self._adapter, self._mesh, self._rank = adapter, mesh, rank
        self._owned = adapter.features.owned & mesh.sizes.keys()
        self._pieces = Pieces()

    def named(self, values: object, method: str) -> dict[str, Any]:
        """Copies on the CPU by name: tensors, or Shown in their place. Raises AdapterError for anything else."""
        if not isinstance(values, Mapping):
            raise self._refusal(method, type(values).__name__)
        return {name: self._one(value, name, method) for name, value in values.items()}

    def tensor(self, value: object, method: str) -> Tensor:
        """A copy of a plain tensor. Raises AdapterError for anything else."""
        if type(value) not in (Tensor, nn.Parameter):
            what = f"{method}() of adapter {self._adapter.name!r} returned no tensor"
            then = "see fsdpcheck.adapter.Observed"
            raise AdapterError(explain(what, got=type(value).__name__, wanted="torch.Tensor", then=then))
        assert isinstance(value, Tensor)
        return value.detach().clone()

    def _one(self, value: object, name: str, method: str) -> Tensor | Shown:
        try:
            if self._owned and isinstance(value, Tensor):
                owners = layouts_private.companions(value) if is_dtensor(value) else (self._rank,)
                return replace(self._of_part(Part(value, tuple(value.shape), self._owned)), owners=owners)
            if isinstance(value, Part):
                return self._of_part(value)
            if isinstance(value, Tensor) and is_dtensor(value):
                return self._of_dtensor(value)
        except NotPlaced as error:
            raise self._refusal(method, f"{name}: {error}") from error
        if type(value) not in (Tensor, nn.Parameter):
            raise self._refusal(method, f"{name}: {type(value).__name__}")
        assert isinstance(value, Tensor)
        return value.detach().to("cpu", copy=True)

    def _of_dtensor(self, value: Tensor) -> Tensor | Shown:
        piece, ranks = self._pieces.of(value), layouts_private.companions(value)
        if piece is None:
            raise NotPlaced("this rank is not on its mesh")
        if len(ranks) == 1:
            return piece.values.reshape(piece.shape).to(value.dtype)
        return Shown(piece, value.dtype, ranks)

    def _of_part(self, part: Part) -> Shown:
        value = part.value.detach()
        if is_dtensor(value):
            piece, of_mesh = self._pieces.of(value), layouts_private.companions(value)
            if piece is None:
                raise NotPlaced("this rank is not on its mesh")
            ranks = {rank for other in of_mesh for rank in companions(self._mesh, other, part.axes)}
            return Shown(piece, value.dtype, tuple(sorted(ranks)))
        if part.start is not None:
            piece = self._pieces.of_range(part.shape, value, part.start)
        else:
            piece = self._pieces.of_block(part.shape, value, part.offsets or (0,) * value.dim())
        return Shown(piece, value.dtype, companions(self._mesh, self._rank, part.axes))

    def _refusal(self, method: str, got: str) -> AdapterError:
        what = f"{method}() of adapter {self._adapter.name!r} returned something else than tensors by name"
        wanted = "dict[str, torch.Tensor]: whole ones, DTensors, or Part by canonical parameter name"
        return AdapterError(explain(what, got=got, wanted=wanted, then="see fsdpcheck.adapter.Trainer"))


def companions(mesh: MeshSpec, rank: int, axes: frozenset[str]) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` along these axes alone, itself among them."""
    sizes = mesh.sizes
    numbers = torch.arange(mesh.world_size).reshape(tuple(sizes.values()) or (1,))
    here = torch.unravel_index(torch.tensor(rank), numbers.shape)
    along = tuple(slice(None) if axis in axes else int(at) for axis, at in zip(sizes, here, strict=False))
    return tuple(numbers[along].reshape(-1).tolist())
