"""Span: a contiguous range of one flattened tensor, and the boxes that it is made of in the tensor's own shape.

Flat buffers cut a parameter at any element, ``fully_shard`` cuts it between rows; a span says both. Files of
torch.distributed.checkpoint know only boxes (offsets and sizes in each dim), so a span is written as few boxes, each
contiguous::

    shape [4, 5], elements 3 to 17:    row 0: columns 3-4  |  rows 1-2  |  row 3: columns 0-1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """``value`` [n], a live view, is elements ``start`` to start + n of a flattened tensor of ``shape``; n may be 0.

    ``writes`` is False on a rank whose span is a copy of one that another rank writes.
    """

    shape: torch.Size
    start: int
    value: Tensor
    writes: bool = True

    @property
    def stop(self) -> int:
        """Position after the last element."""
        return self.start + self.value.numel()

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Each box with its part of ``value``, a live view in the box's shape."""
        position = 0
        for box in boxes(self.shape, self.start, self.stop):
            count = math.prod(box.sizes)
            yield box, self.value[position : position + count].view(box.sizes)
            position += count


@dataclass(frozen=True)
class Box:
    """A part of a tensor: ``sizes`` elements from ``offsets`` on, in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements ``start`` to ``stop`` of a flattened tensor as boxes, in order: at most 2 * dims - 1 of them."""
    if stop <= start:
        return []
    if not shape:
        return [Box((), ())]
    width = math.prod(shape[1:])
    first, last = -(-start // width), stop // width  # whole rows
    if first > last:
        return _in_row(shape, last, start, stop)
    rows = [Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if last > first else []
    head = _in_row(shape, first - 1, start, first * width)
    return [*head, *rows, *_in_row(shape, last, last * width, stop)]


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Elements that lie in one ``row``."""
    before = row * math.prod(shape[1:])
    inner = boxes(shape[1:], start - before, stop - before)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]
