"""A range of a flattened tensor as boxes: every range of small shapes."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import torch

from fsdpcheck.impl.sharding.spans import Span, boxes
from tests.common.tables import each

SHAPES = [(), (1,), (5,), (3, 4), (4, 1), (1, 4), (2, 3, 2), (2, 1, 3), (2, 2, 2, 2), (0,), (3, 0)]


@each("shape", SHAPES)
def test_boxes_hold_the_range_in_order_and_nothing_else(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    whole = torch.arange(count).view(shape)
    for start, stop in combinations_with_replacement(range(count + 1), 2):
        found = boxes(shape, start, stop)
        taken = [whole[tuple(map(slice, b.offsets, map(sum, zip(b.offsets, b.sizes, strict=True))))] for b in found]
        assert [i for part in taken for i in part.flatten().tolist()] == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


@each("shape", SHAPES)
def test_a_box_of_a_span_is_a_live_view_of_its_values(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    for start, stop in combinations_with_replacement(range(count + 1), 2):
        span = Span(torch.Size(shape), start, torch.zeros(stop - start))
        whole = torch.arange(float(count)).view(shape)
        for box, view in span.boxes():
            place = tuple(map(slice, box.offsets, map(sum, zip(box.offsets, box.sizes, strict=True))))
            view.copy_(whole[place])
        assert span.value.tolist() == list(range(start, stop))
