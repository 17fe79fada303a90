"""One gather of all parameters is what DTensor.full_tensor says of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdpcheck.adapters.builtin._gather import full_values, local_tensors
from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import Execution, RankResult, RunRequest


def _run(program: Callable[[RunRequest, int, torch.device, RankResult], None], world_size: int) -> Execution:
    engine = InProcessEngine(program=program)
    case = TrainingCase(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=world_size))
    execution = engine.run(RunRequest(case, "fully_shard"))
    engine.close()
    return execution


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
    execution = _run(_program, world_size)
    assert execution.failure is None, execution.failure
    assert len(execution.ranks[0].initial) == 11


def _one_wrong_element(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    """Each element of each rank's shards is changed in turn; every rank shows that one change and no other."""
    world = request.case.world_size
    mesh = init_device_mesh("cpu", (world,))
    shapes = [(1, 2), (3,), (4, 1), (5, 2)]
    sharded = {str(shape): distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for shape in shapes}
    shown = 0
    for name, tensor in sharded.items():
        (own,) = local_tensors([tensor])
        longest = -(-tensor.shape[0] // world) * tensor.shape[1:].numel()
        for wrong in range(world):
            for element in range(longest):
                mine = rank == wrong and element < own.numel()
                if mine:
                    own.view(-1)[element] = 2
                found = _changed_places(sharded)
                place = wrong * longest + element
                assert found == {other: [place] if other == name and place < tensor.numel() else [] for other in found}
                shown += place < tensor.numel()
                if mine:
                    own.view(-1)[element] = 1
    result.initial["shown"] = torch.tensor(shown)


def _changed_places(sharded: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: (value != 1).view(-1).nonzero().view(-1).tolist() for name, value in full_values(sharded).items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_one_wrong_element_of_one_rank_is_shown_by_every_rank(world_size: int) -> None:
    execution = _run(_one_wrong_element, world_size)
    assert execution.failure is None, execution.failure
    assert [result.initial["shown"].item() for result in execution.ranks] == [2 + 3 + 4 + 10] * world_size


def _replicas(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(6.0).view(3, 2)
    tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    assert torch.equal(full_values({"x": tensor})["x"], whole)
    if rank == 3:
        local_tensors([tensor])[0].add_(1)
    result.initial = full_values({"x": tensor})


def test_every_replica_shows_its_own_shards() -> None:
    execution = _run(_replicas, 4)
    assert execution.failure is None, execution.failure
    whole, wrong = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [[0.0, 1.0], [2.0, 3.0], [5.0, 6.0]]
    assert [result.initial["x"].tolist() for result in execution.ranks] == [whole, whole, wrong, wrong]


def _short_shard(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(1 + rank)
    full_values({"x": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,))})


def test_a_shard_of_another_shape_than_its_rank_has_is_refused() -> None:
    failure = _run(_short_shard, 2).failure
    assert failure is not None
    assert "the shard of x on rank 0 of 2 is [1], wanted [2]" in failure.text
