"""Byte accounts against what tensors really hold, and against known models on the meta device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.costs import memory
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import each
from tests.impl.ways import WAYS, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

UNITS = ["0", "1", "2"]


def network() -> nn.Sequential:
    built = nn.Sequential(
        nn.Sequential(nn.Linear(3, 5), nn.ReLU()),
        nn.Sequential(nn.Linear(5, 7), nn.ReLU()),
        nn.Sequential(nn.Linear(7, 2)),
        nn.Linear(2, 1),
    ).double()
    built[1][0].bias.requires_grad_(False)
    return built


def held(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def flat_tensors(rank: int, world_size: int) -> tuple[int, int]:
    sharded = ShardedModel(network(), UNITS, collectives.axis(), True)
    buffers = [buffer for unit in sharded.units for buffer in unit.buffers]
    shards: list[Tensor] = [buffer.shard for buffer in buffers]
    padding = sum(len(buffer.shard[buffer.padding]) * buffer.shard.element_size() for buffer in buffers)
    gathered = held([buffer.full for buffer in buffers]) if world_size > 1 else 0
    assert gathered == 0
    return held(shards), padding


def row_tensors(rank: int, world_size: int) -> tuple[int, int]:
    sharded = PerParameterModel(network(), UNITS, init_device_mesh("cpu", (world_size,)), True)
    locals_ = [p.to_local() for p in sharded.module.parameters() if isinstance(p, DTensor)]
    return sum(local.numel() * local.element_size() for local in locals_), 0


@each("world_size", [1, 2, 3, 4, 6])
@each(
    ("measured", "account"),
    [(flat_tensors, memory.flat_account), (row_tensors, memory.per_parameter_account)],
    ids=["flat", "per-parameter"],
)
def test_parameters_are_what_the_shards_hold(
    ranks: Ranks, world_size: int, measured: Callable[[int, int], tuple[int, int]], account: Any
) -> None:
    found = ranks(lambda rank: measured(rank, world_size), world_size)
    for rank, (parameters, padding) in enumerate(found):
        wanted = account(network(), UNITS, world_size, rank)
        assert (wanted.parameters, wanted.padding) == (parameters, padding)


class Watch:
    """The most bytes that were gathered at any moment of a forward and backward."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.most, self.sharded = 0, sharded
        for module in sharded.module.modules():
            module.register_forward_pre_hook(lambda *_: self.look())
            module.register_full_backward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        buffers = [buffer for unit in self.sharded.units for buffer in unit.buffers]
        self.most = max(self.most, held([buffer.full for buffer in buffers]))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_no_more_is_gathered_than_the_formula_says(ranks: Ranks, world_size: int, reshard: bool) -> None:
    def most(rank: int) -> int:
        sharded = ShardedModel(network(), UNITS, collectives.axis(), reshard)
        watch = Watch(sharded)
        outputs = sharded(torch.ones(1, 3).double())
        sharded.backward(outputs, torch.ones_like(outputs))
        sharded.reduce_gradients()
        sharded.reshard()
        last = held([buffer.full for unit in sharded.units for buffer in unit.buffers])
        assert last == 0
        return watch.most

    account = memory.flat_account(network(), UNITS, world_size, reshard_after_forward=reshard)
    assert ranks(most, world_size) == [account.peak_unsharded] * world_size


def test_a_model_of_half_a_billion_parameters_without_allocating_it() -> None:
    """32 layers of width 1024 with a vocabulary of 50,000: e * n / W bytes of fp32 parameters at W = 8."""
    with torch.device("meta"):
        blocks = [nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True) for _ in range(32)]
        model = nn.Sequential(nn.Embedding(50_000, 1024), *blocks, nn.Linear(1024, 50_000, bias=False))
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert numel == 505_479_168
    units = [str(position) for position in range(len(model))]
    for account in (memory.flat_account, memory.per_parameter_account):
        found = account(model, units, 8, states=2)
        assert numel * 4 / 8 <= found.parameters < numel * 4 / 8 + 4 * 8 * 400
        assert found.optimizer_state == 2 * found.parameters
        assert found.gradients == found.parameters
    assert all(parameter.is_meta for parameter in model.parameters())


def plain_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that ``fully_shard`` holds gathered now."""
    gathered = {id(p): p for p in module.parameters() if not isinstance(p, DTensor)}
    return sum(parameter.numel() * parameter.element_size() for parameter in gathered.values())


@pytest.mark.parametrize("reshard", [True, False])
def test_per_parameter_sharding_gathers_no_more_than_the_formula_says(ranks: Ranks, reshard: bool) -> None:
    def most(rank: int) -> int:
        sharded = PerParameterModel(network(), UNITS, init_device_mesh("cpu", (2,)), reshard)
        seen = [0]
        for module in sharded.module.modules():
            module.register_forward_pre_hook(lambda *_: seen.append(plain_bytes(sharded.module)))
            module.register_full_backward_pre_hook(lambda *_: seen.append(plain_bytes(sharded.module)))
        outputs = sharded(torch.ones(1, 3).double())
        sharded.backward(outputs, torch.ones_like(outputs), sync=True)
        sharded.reshard()
        assert plain_bytes(sharded.module) == 0
        return max(seen)

    account = memory.per_parameter_account(network(), UNITS, 2, reshard_after_forward=reshard)
    root, one_at_a_time = plain_bytes(nn.Linear(2, 1).double()), plain_bytes(network()[1])
    for seen in ranks(most, 2):
        assert root + one_at_a_time <= seen <= account.peak_unsharded
        assert reshard or seen == account.peak_unsharded


SIZE = 61
"""No other tensor of a step has as many elements as a whole layer of this width."""


@pytest.mark.parametrize("passes", ["two_pass", "bookkeeping"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_as_large_as_a_layer_survives_a_step(ranks: Ranks, way: str, passes: Any) -> None:
    """Tensors whose storage is at least a layer's weight, before the first step and after the second."""

    def large() -> int:
        gc.collect()
        tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
        return len({t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes() >= 8 * SIZE * SIZE})

    trainers: list[Trainer] = []

    def step(rank: int) -> None:
        module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)).double()
        options = Options(2, privacy=Privacy(Flat(1.0), Mode(passes=passes)))
        trainer = Trainer(WAYS[way](module, ["0", "2"], True), loss, sgd, options)
        trainers.append(trainer)
        x = torch.ones(1, SIZE).double() * rank
        for _ in range(2):
            trainer.step([MicroBatch(x, x, [rank])])

    before = large()
    ranks(step, 3)
    assert len(trainers) == 3
    assert large() == before
    trainers[0].model.shards()[0].grad = None  # the trainers were alive until here


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)
