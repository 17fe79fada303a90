"""docs/upstream/dtensor_largest_of_an_empty_shard.py: what of torch 2.13 takes a largest value of shards hangs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdpcheck


def _clipped(rows: int, norm_type: float) -> None:
    layer = nn.Linear(2, rows, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    layer(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, norm_type=norm_type)


@pytest.mark.parametrize(("rows", "norm_type"), [(2, float("inf")), (1, 2.0)])
def test_a_norm_of_shards_is_had_where_none_is_empty_or_it_is_a_sum(rows: int, norm_type: float) -> None:
    fsdpcheck.simulate(_clipped, 2, (rows, norm_type)).check()


def test_an_infinity_norm_of_an_empty_shard_hangs_the_other_rank() -> None:
    failure = fsdpcheck.simulate(_clipped, 2, (1, float("inf"))).failure
    assert failure is not None
    assert "cannot compute the infinity norm on an empty tensor" in str(failure)
    assert "rank 1 raised" in str(failure)
