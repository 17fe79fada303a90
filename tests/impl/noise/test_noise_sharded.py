"""Noise on sharded models: every number of ranks, both ways of sharding and replicas give the single device's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.noise.gaussian import Noise
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded
from tests.common.tables import each
from tests.impl import ways

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

UNITS = ["0", "1"]
SEEDED = gaussian.seeded(11)
STEP, DEVIATION = 5, 0.75


def net() -> nn.Module:
    """A tied weight, a frozen bias, a head of one row: 36 trainable elements of float32 in three units."""
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    tied[1].bias.requires_grad_(False)
    return nn.Sequential(tied, nn.Linear(5, 1, bias=False), nn.Linear(1, 1, bias=False))


def definition() -> dict[str, Tensor]:
    """What the single device adds, from the noise of whole parameters."""
    trainable = {name: p for name, p in net().named_parameters() if p.requires_grad}
    return {
        name: SEEDED.normal(name, STEP, 0, p.numel(), DEVIATION, p.dtype, p.device).view(p.shape)
        for name, p in trainable.items()
    }


def flat(world_size: int) -> Sharded:
    return ways.flat(net(), UNITS, True)


def per_parameter(world_size: int) -> Sharded:
    return ways.per_parameter(net(), UNITS, True)


def flat_replicated(world_size: int) -> Sharded:
    mesh = replicated(world_size)
    replicate, shard = (collectives.axis(mesh.get_group(number)) for number in range(2))
    return ShardedModel(net(), UNITS, shard, True, replicate)


def per_parameter_replicated(world_size: int) -> Sharded:
    return PerParameterModel(net(), UNITS, replicated(world_size), True)


def replicated(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))


CASES = [(way, world_size) for way in (flat, per_parameter) for world_size in range(1, 9)]
CASES += [(way, world_size) for way in (flat_replicated, per_parameter_replicated) for world_size in (4, 6)]


def noisy(ranks: Ranks, way: Callable[[int], Sharded], world_size: int) -> list[dict[str, Tensor]]:
    """The whole gradients as each rank sees them, after noise was added to gradients of zero."""

    def body(rank: int) -> dict[str, Tensor]:
        model = way(world_size)
        model.backward(model(torch.zeros(2, 5)), torch.zeros(2, 1), sync=True)
        model.reduce_gradients()
        SEEDED.add_(model.pieces(), STEP, DEVIATION)
        return model.full_gradients()

    found: list[dict[str, Tensor]] = ranks(body, world_size)
    return found


@each(("way", "world_size"), CASES)
def test_sharded_noise_has_the_bits_of_the_single_device(
    ranks: Ranks, way: Callable[[int], Sharded], world_size: int
) -> None:
    wanted = definition()
    for rank, gradients in enumerate(noisy(ranks, way, world_size)):
        assert set(gradients) == set(wanted)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, wanted[name]), (rank, name)


@pytest.mark.parametrize("way", [flat_replicated, per_parameter_replicated])
def test_replicas_with_noise_of_their_own_would_be_seen(
    ranks: Ranks, way: Callable[[int], Sharded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: each rank's noise is keyed by its rank."""
    wanted, honest = definition(), Noise.normal

    def own(self: Noise, name: str, *rest: object) -> Tensor:
        return honest(self, f"{name} on rank {torch.distributed.get_rank()}", *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Noise, "normal", own)
    found = noisy(ranks, way, 4)
    assert any(not torch.equal(gradients[name], wanted[name]) for gradients in found for name in wanted)


def test_a_secure_key_crosses_both_axes_of_a_mesh(ranks: Ranks) -> None:
    def body(rank: int) -> Noise:
        model = flat_replicated(6)
        return gaussian.secure(model.axis, model.replicas)

    found = ranks(body, 6)
    assert found == [found[0]] * 6
    assert [operation for operation, subject in ranks.trace(5) if subject == gaussian.KEY.fqn] == ["all_reduce"] * 2
