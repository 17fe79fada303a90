"""A rank's piece of a tensor, plain or sharded in any way, taken without a word to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.compat import layouts_private
from fsdpcheck.compat.layouts_private import FlatPart, Layout
from fsdpcheck.compat.torch_private import is_dtensor, own_part

PARTIAL: Final = ("sum", "avg", "max", "min", "norm")
"""How parts of a tensor can be put together; a norm has its order after it."""


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor.

    ``shape``: of the whole tensor. ``values``: float64 (or int64, bool), one-dimensional, on the CPU, a copy.
    ``places``: int64, where in the flattened whole tensor each value stands; None for the whole of it, in order.
    ``partial``: "" where the values are the tensor's; "sum", "avg" or "norm p" where those of ranks are still to be
    added, averaged, or put together as p-norms of parts; "max" and "min" are those of parts. ``parts``: how many ranks
    have a part of each value. ``replica``: which of several equal wholes the part is of.
    """

    shape: tuple[int, ...]
    values: Tensor
    places: Tensor | None = None
    partial: str = ""
    parts: int = 1
    replica: tuple[int, ...] = ()

    def equals(self, other: Piece) -> bool:
        """Whether the two have the same values at the same places, bit for bit but for the signs of zeros."""
        if (self.shape, self.partial, self.parts) != (other.shape, other.partial, other.parts):
            return False
        if self.partial and self.replica != other.replica:
            return False
        if (self.places is None) != (other.places is None) or not torch.equal(self.values, other.values):
            return False
        return self.places is None or other.places is None or torch.equal(self.places, other.places)


@dataclass(frozen=True)
class Shown:
    """What a rank shows of a tensor that ``ranks`` have pieces of, itself among them: one whole of it together.

    ``dtype``: the tensor's. ``owners``: those of them that have it; the others may show nothing of it. None: all have.
    """

    piece: Piece
    dtype: torch.dtype
    ranks: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class NotPlaced(Exception):
    """Where values of a tensor stand in the whole is not known; the text says why."""


class Pieces:
    """Takes pieces, and keeps the places of those that lie alike, so that they share one tensor."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[object, ...], tuple[Layout | None, Tensor | None]] = {}
        self._parts: dict[FlatPart, Tensor] = {}

    def of(self, tensor: Tensor) -> Piece | None:
        """This rank's piece: a copy, which nothing that the script does changes. None where the rank has none.

        Raises NotPlaced for a tensor whose values have no known place, or no values.
        """
        local = layouts_private.waited(own_part(tensor))
        with layouts_private.aside():
            if not is_dtensor(tensor):
                return Piece(tuple(local.shape), _values(local))
            return self._of_dtensor(tensor, local)

    def of_part(self, tensor: Tensor, part: FlatPart) -> Piece | None:
        """The piece of the parameter that ``part`` is about of its value, gradient or state ``tensor``.

        A tensor of another size than the parameter's is taken whole: a count of steps, say. Raises NotPlaced.
        """
        if part.converted:
            raise NotPlaced("it is a part of a part that FSDP has flattened")
        with layouts_private.aside():
            if tuple(tensor.shape) == part.shape and not (part.flat and tensor.ndim == 1):
                return Piece(part.shape, _values(tensor))
            if tensor.ndim != 1 or tensor.numel() != (part.local if part.flat else part.count):
                return _of_another_size(tensor, part)
            values = tensor[part.offset : part.offset + part.count] if part.flat else tensor
            if part not in self._parts:
                self._parts[part] = part.places()
            return Piece(part.shape, _values(values), self._parts[part])

    def of_block(self, shape: Sequence[int], tensor: Tensor, offsets: Sequence[int]) -> Piece:
        """The piece of a block of a whole of ``shape`` that begins at ``offsets``."""
        with layouts_private.aside():
            indices = {
                dim: torch.arange(o, o + n, device="cpu")
                for dim, (o, n) in enumerate(zip(offsets, tensor.shape, strict=True))
            }
            return Piece(tuple(shape), _values(tensor), _places(tuple(shape), indices))

    def of_range(self, shape: Sequence[int], tensor: Tensor, start: int) -> Piece:
        """The piece that has the values from the ``start``-th on of a flattened whole of ``shape``."""
        with layouts_private.aside():
            places = torch.arange(start, start + tensor.numel(), device="cpu")
            return Piece(tuple(shape), _values(tensor), places)

    def _of_dtensor(self, tensor: Tensor, local: Tensor) -> Piece | None:
        key = layouts_private.layout_key(tensor)
        if key not in self._layouts:
            layout = layouts_private.layout_of(tensor)
            places = None if layout is None or not layout.indices else _places(layout.shape, layout.indices)
            self._layouts[key] = layout, places
        layout, places = self._layouts[key]
        if layout is None:
            return None
        if len(set(layout.partial)) > 1:
            raise NotPlaced(f"it is partial in several ways: {', '.join(layout.partial)}")
        if layout.partial and layout.partial[0].partition(" ")[0] not in PARTIAL:
            raise NotPlaced(f"parts of it are to be put together by {layout.partial[0]}")
        wanted = len(places) if places is not None else _product(layout.shape)
        if local.numel() != wanted:
            raise NotPlaced(f"{key[-1]} gives this rank {wanted} of its values, and it has {local.numel()}")
        partial = layout.partial[0] if layout.partial else ""
        return Piece(layout.shape, _values(local), places, partial, layout.parts, layout.replica)


def number(value: float) -> Piece:
    """A number as the piece of a tensor without dimensions."""
    with layouts_private.aside():
        return Piece((), torch.tensor([value], dtype=torch.float64, device="cpu"))


def _of_another_size(tensor: Tensor, part: FlatPart) -> Piece:
    if tensor.numel() != 1:
        raise NotPlaced(
            f"it has shape {tuple(tensor.shape)}, and its parameter {part.shape} in {part.local} flat values"
        )
    return Piece(tuple(tensor.shape), _values(tensor))


def _values(tensor: Tensor) -> Tensor:
    """Its values in order: a copy as int64 of integers, as bool of bools, as float64 of floating types."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise NotPlaced(f"its layout is {tensor.layout}")
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not layouts_private.is_flat(tensor):
        raise NotPlaced(f"its class is {type(tensor).__qualname__}")
    if tensor.is_meta or tensor.is_complex():
        raise NotPlaced("it has no values" if tensor.is_meta else "it is complex")
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype if tensor.dtype is torch.bool else torch.int64
    return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor.detach()).reshape(-1)


def _places(shape: tuple[int, ...], indices: dict[int, Tensor]) -> Tensor:
    """Places in the flattened whole of what has these indices of some dimensions and all of the others."""
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    for dim, size in enumerate(shape):
        of_dim = indices.get(dim)
        of_dim = torch.arange(size, device="cpu") if of_dim is None else of_dim
        found = (found[:, None] * size + of_dim[None, :]).reshape(-1)
    return found


def _product(shape: Sequence[int]) -> int:
    return reduce(lambda one, other: one * other, shape, 1)
