"""``sync_module_states``: ranks that have built other models start from rank 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded
from tests.impl.network import network
from tests.impl.ways import WAYS

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

Named = dict[str, Tensor]


def built(rank: int) -> nn.Module:
    """The network with all values of a rank's own, a frozen parameter and a buffer among them."""
    module = network()
    module[0].register_buffer("scale", torch.ones(2))
    next(module.parameters()).requires_grad_(False)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value += rank
    return module


def values(module: nn.Module) -> Named:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def replicas(way: str, module: nn.Module) -> Sharded:
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if way == "per-parameter":
        return PerParameterModel(module, ["0", "1"], mesh, True, sync_module_states=True)
    replicate, shard = (collectives.axis(mesh.get_group(name)) for name in ("replicate", "shard"))
    return ShardedModel(module, ["0", "1"], shard, True, replicate, sync_module_states=True)


def same(found: list[Named]) -> bool:
    right = values(built(0))
    return all(own.keys() == right.keys() and all(torch.equal(own[n], v) for n, v in right.items()) for own in found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", [True, False])
def test_parameters_and_buffers_are_rank_0s(ranks: Ranks, way: str, sync: bool) -> None:
    def run(rank: int) -> Named:
        module = built(rank)
        sharded = WAYS[way](module, ["0", "1"], True, sync_module_states=sync)
        return {**sharded.full_values(), **dict(module.named_buffers())}

    assert same(ranks(run, 3)) == sync


@pytest.mark.parametrize("way", WAYS)
def test_replicas_start_from_rank_0_too(ranks: Ranks, way: str) -> None:
    def run(rank: int) -> Named:
        module = built(rank)
        return {**replicas(way, module).full_values(), **dict(module.named_buffers())}

    assert same(ranks(run, 4))


@pytest.mark.parametrize("way", WAYS)
def test_values_for_a_meta_model_need_not_be_equal_then(ranks: Ranks, way: str) -> None:
    def run(rank: int) -> Named:
        own = dict(built(rank).named_parameters())
        module = built(rank).to("meta")
        sharded = WAYS[way](
            module, ["0", "1"], True, initial=lambda name, _: own[name].detach().clone(), sync_module_states=True
        )
        return {**sharded.full_values(), "0.scale": torch.ones(2)}

    assert same(ranks(run, 3))


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_alone_sends_nothing(ranks: Ranks, way: str) -> None:
    def run(rank: int) -> None:
        WAYS[way](built(rank), ["0", "1"], True, sync_module_states=True)

    ranks(run, 1)
    assert not [op for op, _ in ranks.trace(0) if op == "broadcast"]
