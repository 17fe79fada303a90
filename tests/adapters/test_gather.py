"""One gather of all parameters is what DTensor.full_tensor says of each."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdpcheck.adapters._gather import full_values
from fsdpcheck.case import Case, LayerSpec, MeshSpec, ModelSpec
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import RankResult, RunRequest


def _program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    mesh = init_device_mesh("cpu", (request.case.world_size,))
    shapes = [(1, 1), (2, 3), (3,), (4, 2), (5, 1), (7, 2, 2), (0, 2)]
    whole = {str(shape): torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in shapes}
    whole["double"] = torch.arange(5, dtype=torch.float64)
    sharded: dict[str, torch.Tensor] = {name: distribute_tensor(v, mesh, [Shard(0)]) for name, v in whole.items()}
    sharded["replicated"] = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
    sharded["columns"] = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(1)])
    sharded["plain"] = torch.ones(2)
    wanted = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in sharded.items()}
    got = full_values(sharded)
    assert list(got) == list(sharded)
    assert all(type(value) is torch.Tensor for value in got.values())
    assert all(torch.equal(got[name], value) and got[name].dtype == value.dtype for name, value in wanted.items())
    result.initial = got


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_at_once_is_one_by_one(world_size: int) -> None:
    engine = SimulatedEngine(program=_program)
    case = Case(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=world_size))
    execution = engine.run(RunRequest(case, "fully_shard"))
    engine.close()
    assert execution.failure is None, execution.failure
    assert len(execution.ranks[0].initial) == 11
