"""RowLayout: tensors split on their first dim, as ``fully_shard`` splits parameters, packed for one collective.

W ranks, a parameter of n rows: chunk = ceil(n / W) rows a rank, so the last ranks own fewer rows or none::

    7 rows, W = 3:   rank 0: rows 0-2   rank 1: rows 3-5   rank 2: row 6, and 2 rows of padding in a packed buffer

A packed buffer is [W * s]: for each rank its chunks of all tensors, end to end; s is the same on every rank.

Source: ``Shard(0)`` of DTensor, which splits like ``torch.chunk``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowLayout:
    """Tensors of ``shapes`` (at least one dim each) split over ``size`` ranks."""

    def __init__(self, shapes: Sequence[torch.Size], size: int) -> None:
        self.shapes, self.size = list(shapes), size
        self.chunks = [-(-shape[0] // size) for shape in shapes]
        self.widths = [shape[1:].numel() for shape in shapes]
        self._counts = [chunk * width for chunk, width in zip(self.chunks, self.widths, strict=True)]

    def rows(self, position: int, rank: int) -> slice:
        """The rows of tensor number ``position`` that ``rank`` owns; maybe none."""
        n, chunk = self.shapes[position][0], self.chunks[position]
        return slice(min(rank * chunk, n), min((rank + 1) * chunk, n))

    def elements(self, position: int, rank: int) -> slice:
        """The same as a range of the flattened tensor."""
        rows, width = self.rows(position, rank), self.widths[position]
        return slice(rows.start * width, rows.stop * width)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[W * s], new, from whole tensors; padding is zero."""
        columns = []
        for tensor, shape, chunk in zip(tensors, self.shapes, self.chunks, strict=True):
            missing = chunk * self.size - shape[0]
            padded = torch.cat([tensor, tensor.new_zeros(missing, *shape[1:])]) if missing else tensor
            columns.append(padded.reshape(self.size, -1))
        return torch.cat(columns, dim=1).reshape(-1)

    def pack_own(self, locals_: Sequence[Tensor]) -> Tensor:
        """[s], new: one rank's section, from the rows that it owns of each tensor."""
        sections = []
        for local, count in zip(locals_, self._counts, strict=True):
            flat = local.reshape(-1)
            sections.append(torch.nn.functional.pad(flat, (0, count - flat.numel())))
        return torch.cat(sections)

    def own(self, section: Tensor, rank: int) -> list[Tensor]:
        """From ``rank``'s section [s]: the rows that it owns of each tensor, padding cut off."""
        found = []
        for position, flat in enumerate(torch.split_with_sizes(section, self._counts)):
            rows = self.rows(position, rank)
            count = rows.stop - rows.start
            found.append(flat[: count * self.widths[position]].view(count, *self.shapes[position][1:]))
        return found

    def whole(self, packed: Tensor) -> list[Tensor]:
        """Whole tensors from a packed buffer [W * s]."""
        columns = torch.split_with_sizes(packed.view(self.size, -1), self._counts, dim=1)
        return [
            column.reshape(-1)[: shape.numel()].view(shape) for column, shape in zip(columns, self.shapes, strict=True)
        ]
