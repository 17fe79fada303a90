"""Whole tensors are what one rank computes, however they are sharded: bit for bit, for every number is a whole one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

from fsdpcheck.compat import layouts_private
from tests.comparison.observation.observing import Observed, observe, same

FSDP1 = """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
    def wrapped(module, strategy, orig, **options):
        return FSDP(module, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=orig, **options)
    def train_wrapped(strategy, orig, **options):
        model = Net()
        model.one = wrapped(model.one, strategy, orig, **options)
        model = wrapped(model, strategy, orig, **options)
        train(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
"""

SCRIPTS = {
    "replicated by DDP, plain on one rank": """
        model = Net() if W == 1 else nn.parallel.DistributedDataParallel(Net())
        train(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    """,
    "fully_shard, uneven": """
        from torch.distributed.fsdp import fully_shard
        model = Net()
        fully_shard(model.one)
        fully_shard(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    """,
    "fully_shard along the other dimension": """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard
        model = Net(6)
        fully_shard(model, shard_placement_fn=lambda parameter: Shard(1) if parameter.shape == (2, 6) else None)
        train(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    """,
    "FSDP, flat": FSDP1 + '    train_wrapped("FULL_SHARD", False)',
    "FSDP, original parameters": FSDP1 + '    train_wrapped("FULL_SHARD", True)',
    "FSDP, flat, SHARD_GRAD_OP": FSDP1 + '    train_wrapped("SHARD_GRAD_OP", False)',
    "FSDP, original parameters, SHARD_GRAD_OP": FSDP1 + '    train_wrapped("SHARD_GRAD_OP", True)',
    "FSDP, flat, NO_SHARD": FSDP1 + '    train_wrapped("NO_SHARD", False)',
    "FSDP, original parameters, NO_SHARD": FSDP1 + '    train_wrapped("NO_SHARD", True)',
    "FSDP, flat, transposed": FSDP1.replace("model = Net()", "model = transposed()", 1)
    + """
    def transposed():
        model = Net()
        model.one.weight = nn.Parameter(whole_numbers(3, 5).t())
        return model
    if W == 1:
        model = transposed()
        train(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    else:
        train_wrapped("FULL_SHARD", False)
    """,
    "ZeRO optimizer": """
        from torch.distributed.optim import ZeroRedundancyOptimizer
        model = nn.parallel.DistributedDataParallel(Net())
        train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.125, momentum=0.5))
    """,
    "tensor-parallel": """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        plan = {"one": ColwiseParallel(), "two": RowwiseParallel()}
        model = parallelize_module(Net(6), init_device_mesh("cpu", (W,)), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (model(x) - y).sum().backward()
            optimizer.step()
    """,
    "partial gradients": """
        from torch.distributed.tensor import Partial, Replicate, distribute_tensor
        mesh = init_device_mesh("cpu", (W,))
        parameter = nn.Parameter(distribute_tensor(whole_numbers(3, 2), mesh, [Replicate()]))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        here = slice(rank * BATCH // W, (rank + 1) * BATCH // W)
        (x[here] @ parameter.to_local(grad_placements=[Partial()]) - y[here]).sum().backward()
        optimizer.step()
    """,
}  # fmt: skip
ON_FOUR = {
    "fully_shard on two dimensions": """
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2, W // 2) if W > 1 else (1, 1), mesh_dim_names=("replicate", "shard"))
        model = Net()
        fully_shard(model.one, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    """,
    "FSDP, flat, HYBRID_SHARD": FSDP1
    + '    train_wrapped("HYBRID_SHARD", False, device_mesh=init_device_mesh("cpu", (2, 2) if W > 1 else (1, 1)))',
    "FSDP, original parameters, HYBRID_SHARD": FSDP1
    + '    train_wrapped("HYBRID_SHARD", True, device_mesh=init_device_mesh("cpu", (2, 2) if W > 1 else (1, 1)))',
    "partial gradients, repeated": """
        from torch.distributed.tensor import Partial, Replicate, distribute_tensor
        mesh = init_device_mesh("cpu", (2, 2) if W > 1 else (1, 1))
        parameter = nn.Parameter(distribute_tensor(whole_numbers(3, 2), mesh, [Replicate(), Replicate()]))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        here, size = mesh.get_local_rank(1), mesh.size(1)
        part = slice(here * BATCH // size, (here + 1) * BATCH // size)
        local = parameter.to_local(grad_placements=[Replicate(), Partial()])
        (x[part] @ local - y[part]).sum().backward()
        optimizer.step()
    """,
    "strided shards": """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        dp, tp = (W // 2, 2) if W > 1 else (1, 1)
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(Net(8, 4), mesh["tp"], {"one": ColwiseParallel(), "two": RowwiseParallel()})
        fully_shard(model.one, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        per = BATCH // dp
        here = slice(rank // tp * per, (rank // tp + 1) * per)
        for _ in range(2):
            optimizer.zero_grad()
            (model(x[here]).sum() * dp).backward()
            optimizer.step()
    """,
}
BY_DAY = (
    "fully_shard, uneven",
    "FSDP, flat",
    "FSDP, original parameters",
    "partial gradients",
    "partial gradients, repeated",
    "strided shards",
)


def _agree(one: Observed, several: Observed) -> None:
    assert several.notes == []
    assert several.whole.gaps == {}
    assert several.whole.replicas == {}
    assert same(one, several, "initial parameter")
    assert same(one, several, "gradient")
    for step in range(one.observation.ranks[0].steps[0]):
        same(one, several, "gradient", step)
        assert same(one, several, "parameter", step)
        same(one, several, "state momentum_buffer", step)


@pytest.mark.parametrize(
    "sharding", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in SCRIPTS]
)
def test_parts_make_the_whole_of_one_rank(tmp_path: Path, sharding: str) -> None:
    one = observe(tmp_path, SCRIPTS[sharding], 1)
    for size in (2, 3):
        _agree(one, observe(tmp_path, SCRIPTS[sharding], size))


@pytest.mark.parametrize(
    "sharding",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in ON_FOUR],
)
def test_so_they_do_on_meshes_of_two_dimensions(tmp_path: Path, sharding: str) -> None:
    _agree(observe(tmp_path, ON_FOUR[sharding], 1), observe(tmp_path, ON_FOUR[sharding], 4))


def test_the_part_of_a_strided_shard_is_the_one_that_torch_cuts() -> None:
    for length, factor, size in product(range(14), range(1, 5), range(1, 5)):
        placement = _StridedShard(0, split_factor=factor)
        cut, _ = placement._split_tensor(torch.arange(length), size, with_padding=False)
        for here in range(size):
            assert layouts_private._taken(placement, length, size, here).tolist() == cut[here].tolist()
