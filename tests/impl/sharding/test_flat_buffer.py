"""The layout of a flat buffer: every element in exactly one shard, padding zero, views before the padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.sharding.flat_buffer import FlatBuffer
from tests.common.tables import each


def parameters(*shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    count, found = 1, {}
    for i, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        found[f"p{i}"] = nn.Parameter(torch.arange(count, count + size).double().view(shape))
        count += size
    return found


def buffers(world_size: int, *shapes: tuple[int, ...]) -> list[FlatBuffer]:
    return [FlatBuffer(parameters(*shapes), Axis(None, rank, world_size), True) for rank in range(world_size)]


SHAPES = [((1,),), ((2, 5),), ((3,), (2, 2), (1,)), ((4, 4),), ((0,), (3,))]


@each("world_size", [1, 2, 3, 4, 5, 13])
@each("shapes", SHAPES)
def test_shards_are_equal_pieces_of_the_parameters_end_to_end(
    world_size: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    flats = buffers(world_size, *shapes)
    n = flats[0].numel
    everything = torch.cat([flat.shard.detach() for flat in flats])
    assert {flat.shard.numel() for flat in flats} == {-(-n // world_size)}
    assert torch.equal(everything[:n], torch.arange(1, n + 1).double())
    assert not everything[n:].any()
    assert sum(flat.real for flat in flats) == n
    for flat in flats:
        assert flat.shard.detach()[flat.padding].numel() == flat.shard_numel - flat.real
        assert torch.equal(flat.shard.detach()[: flat.real], everything[flat.start :][: flat.real])


def test_ten_elements_on_three_ranks() -> None:
    assert [(flat.real, flat.shard_numel) for flat in buffers(3, (2, 5))] == [(4, 4), (4, 4), (2, 4)]


def test_fewer_elements_than_ranks_leave_whole_shards_of_padding() -> None:
    assert [flat.real for flat in buffers(5, (2,))] == [1, 1, 0, 0, 0]


@each("world_size", [1, 2, 3, 4, 7])
@each("shapes", SHAPES)
def test_owned_parts_of_a_parameter_are_a_partition_of_it(world_size: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    flats = buffers(world_size, *shapes)
    for position, shape in enumerate(shapes):
        covered = [i for flat in flats for i in range(*flat.owned(position).indices(10**6))]
        assert covered == list(range(torch.Size(shape).numel()))
    for flat in flats:
        owned = [p.detach().flatten()[flat.owned(i)] for i, p in enumerate(parameters(*shapes).values())]
        assert torch.equal(torch.cat(owned), flat.shard.detach()[: flat.real])


def test_one_rank_aliases_instead_of_copying() -> None:
    (flat,) = buffers(1, (2, 3))
    assert flat.shard.data_ptr() == flat.full.data_ptr() == flat.parameters[0].data_ptr()
    flat.shard.data += 1
    assert flat.parameters[0].detach().flatten().tolist() == [2, 3, 4, 5, 6, 7]


def test_freed_parameters_hold_no_memory_and_come_back_as_the_same_objects() -> None:
    flat = buffers(2, (2, 3))[0]
    parameter, values = flat.parameters[0], flat.full.clone()
    flat.free()
    assert flat.full.untyped_storage().nbytes() == 0
    assert parameter.numel() == 0
    flat.allocate().copy_(values)
    flat.attach()
    assert flat.parameters[0] is parameter
    assert parameter.detach().tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_gradient_is_packed_with_zeros_for_what_is_missing_and_for_padding() -> None:
    flat = buffers(4, (2,), (3,))[0]
    assert flat.pack([None, torch.ones(3).double()]).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_mixed_dtypes_are_refused_by_name() -> None:
    named = {"a": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(1).double())}
    with pytest.raises(TypeError, match=r"a is torch\.float32.*b is torch\.float64.*other units"):
        FlatBuffer(named, Axis(None, 0, 1), True)
