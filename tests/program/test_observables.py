"""What ranks show in pieces is, put together, what DTensor.full_tensor says of each; nothing travels for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fsdpcheck.adapter import Adapter, Features, Part
from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.program.observables import Showing, companions

Program = Callable[[RunRequest, int, torch.device, RankResult], None]


class _Named:
    name, features = "named", Features(frozenset(), owned=frozenset({"pp"}))


def _run(program: Program, mesh: MeshSpec) -> Execution:
    engine = InProcessEngine(program=program)
    execution = engine.run(RunRequest(TrainingCase(ModelSpec((LayerSpec(1),)), mesh=mesh), "fully_shard"))
    engine.close()
    return execution


def _shown(request: RunRequest, rank: int, values: Mapping[str, object]) -> dict[str, Any]:
    return Showing(cast(Adapter, _Named()), request.training.mesh, rank).named(values, "parameters")


def _initial(execution: Execution) -> list[dict[str, Any]]:
    assert execution.failure is None, execution.failure
    return [{name: value.tolist() for name, value in result.initial.items()} for result in execution.ranks]


def _of_every_kind(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    mesh = init_device_mesh("cpu", (request.case.world_size,))
    shapes = [(1, 1), (2, 3), (3,), (4, 2), (5, 1), (7, 2, 2), (0, 2)]
    whole = {str(shape): torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in shapes}
    whole["double"] = torch.arange(5, dtype=torch.float64)
    whole["narrow"] = torch.arange(5).to(torch.bfloat16)
    sharded: dict[str, Tensor] = {name: distribute_tensor(v, mesh, [Shard(0)]) for name, v in whole.items()}
    sharded["replicated"] = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
    sharded["columns"] = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(1)])
    sharded["partial"] = DTensor.from_local(torch.tensor([1.0, rank]), mesh, [Partial()])
    sharded["plain"] = torch.ones(2)
    wanted = {f"{n} whole": v.full_tensor() if isinstance(v, DTensor) else v for n, v in sharded.items()}
    result.initial = _shown(request, rank, {**sharded, **wanted})


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_pieces_make_what_full_tensor_says(world_size: int) -> None:
    execution = _run(_of_every_kind, MeshSpec(world_size))
    assert execution.failure is None, execution.failure
    for result in execution.ranks:
        names = [name for name in result.initial if not name.endswith(" whole")]
        assert len(names) == 13
        for name in names:
            got, wanted = result.initial[name], result.initial[f"{name} whole"]
            assert (type(got), got.dtype) == (Tensor, wanted.dtype), name
            assert torch.equal(got, wanted), name


def _silently(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    tensor = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    result.initial = _shown(request, rank, {"x": tensor})


def test_showing_adds_no_call() -> None:
    execution = _run(_silently, MeshSpec(2))
    assert _initial(execution) == [{"x": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}] * 2
    assert [len(result.trace) for result in execution.ranks] == [0, 0]


def _changed(place: int) -> Program:
    def program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        mesh = init_device_mesh("cpu", (request.case.world_size,))
        tensor = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
        longest = -(-5 // request.case.world_size) * 2
        own, element = tensor.to_local().detach(), place - rank * longest
        if 0 <= element < own.numel():
            own.view(-1)[element] = 2
        result.initial = _shown(request, rank, {"x": tensor})

    return program


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_wrong_element_of_one_rank_is_shown_by_every_rank(world_size: int) -> None:
    for place in range(10):
        for result in _run(_changed(place), MeshSpec(world_size)).ranks:
            assert (result.initial["x"] != 1).view(-1).nonzero().view(-1).tolist() == [place]


def _replicas(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    tensor = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Replicate(), Shard(0)])
    inner = distribute_tensor(torch.arange(3.0), mesh["dp_shard"], [Shard(0)])
    if rank == 3:
        tensor.to_local().detach().add_(1)
        inner.to_local().detach().add_(1)
    result.initial = _shown(request, rank, {"x": tensor, "inner": inner})


def test_every_replica_shows_its_own_shards() -> None:
    """Also of a tensor whose mesh is one replica's alone."""
    shown = _initial(_run(_replicas, MeshSpec(2, 2)))
    right = {"x": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], "inner": [0.0, 1.0, 2.0]}
    wrong = {"x": [[0.0, 1.0], [2.0, 3.0], [5.0, 6.0]], "inner": [0.0, 1.0, 3.0]}
    assert shown == [right, right, wrong, wrong]


def _by_hand(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    replica, place = divmod(rank, 3)
    block = torch.arange(12.0).view(4, 3)[:, place : place + 1] + 100 * replica
    flat = torch.arange(5.0)[2 * place : 2 * place + 2] + 100 * replica
    owned = [torch.full((2,), 7.0)] if place == 1 else [torch.empty(0)]
    axes: frozenset[Any] = frozenset({"tp"})
    shown: dict[str, object] = {
        "columns": Part(block, (4, 3), axes, offsets=(0, place)),
        "flat": Part(flat, (5,), axes, start=2 * place),
        "owned": Part(owned[0], (2,), axes, start=0),
    }
    result.initial = _shown(request, rank, shown)


def test_parts_told_by_hand_make_a_whole_in_each_replica() -> None:
    shown = _initial(_run(_by_hand, MeshSpec(2, axes=(("tp", 3),))))
    for rank, values in enumerate(shown):
        more = 100.0 * (rank // 3)
        assert values["columns"] == (torch.arange(12.0).view(4, 3) + more).tolist()
        assert values["flat"] == (torch.arange(5.0) + more).tolist()
        assert values["owned"] == [7.0, 7.0]


def test_companions_differ_along_the_named_axes_alone() -> None:
    mesh = MeshSpec(2, 2, axes=(("tp", 2),))  # rank = 4 * dp_replicate + 2 * dp_shard + tp
    assert companions(mesh, 5, frozenset({"tp"})) == (4, 5)
    assert companions(mesh, 5, frozenset({"dp_shard"})) == (5, 7)
    assert companions(mesh, 5, frozenset({"dp_shard", "tp"})) == (4, 5, 6, 7)
    assert companions(mesh, 5, frozenset({"dp_replicate"})) == (1, 5)
    assert companions(mesh, 5, frozenset()) == (5,)
    assert companions(mesh, 5, frozenset({"pp"})) == (5,)
    assert companions(MeshSpec(), 0, frozenset({"tp"})) == (0,)


def _short(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    mesh = init_device_mesh("cpu", (2,))
    short = DTensor.from_local(
        torch.zeros(1 + rank), mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,)
    )
    result.initial = _shown(request, rank, {"x": short})


def _of_stages(placement: Placement, lacking: int | None) -> Program:
    """Two stages of two data ranks: what the first has is shown by its ranks, but for the one that lacks it."""

    def program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
        value = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh["dp_shard"], [placement])
        first = mesh["pp"].get_local_rank() == 0
        result.initial = _shown(request, rank, {"x": value} if first and rank != lacking else {})

    return program


def test_what_a_stage_owns_the_others_are_taken_to_have_and_its_own_ranks_must_show() -> None:
    mesh, x = MeshSpec(2, axes=(("pp", 2),)), {"x": [1.0, 2.0, 3.0]}
    for placement in (Shard(0), Replicate()):
        assert _initial(_run(_of_stages(placement, None), mesh)) == [x] * 4
    assert _initial(_run(_of_stages(Replicate(), 2), mesh)) == [x, x, {}, {}]
    failure = _run(_of_stages(Shard(0), 2), mesh).failure
    assert failure is not None
    assert "and rank 2 shows no piece" in failure.text


def _gap(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    result.initial = _shown(request, rank, {"x": Part(torch.ones(2), (5,), frozenset({"dp_shard"}), start=2 * rank)})


def _twice(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    value = torch.full((3,), float(rank))
    result.initial = _shown(request, rank, {"x": Part(value, (5,), frozenset({"dp_shard"}), start=2 * rank)})


def _unnamed(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    part = Part(torch.ones(1), (2,), frozenset({"dp_shard"}), start=rank)
    result.initial = _shown(request, rank, {"x": part} if rank else {})


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_gap, "1 of 5 values are on no rank, the first at [4]"),
        (_twice, "ranks 0 and 1 both hold place [2], and their values differ"),
        (_unnamed, "rank 1 shows a piece of what ranks 0, 1 have together, and rank 0 shows no piece"),
    ],
)
def test_pieces_that_make_no_whole_break_the_protocol(program: Program, said: str) -> None:
    failure = _run(program, MeshSpec(2)).failure
    assert failure is not None
    assert failure.kind == "adapter"
    assert f"parameters() x: {said}" in " ".join(failure.text.split())


def test_a_shard_of_another_size_than_its_rank_has_is_refused() -> None:
    failure = _run(_short, MeshSpec(2)).failure
    assert failure is not None
    assert failure.kind == "adapter"
    assert "x: (Shard(dim=0),) gives this rank 2 of its values, and it has 1" in failure.text


@pytest.mark.parametrize("value", [1.0, [torch.ones(1)]])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    case = TrainingCase(ModelSpec((LayerSpec(1),)))
    with pytest.raises(AdapterError, match=r"parameters\(\) of adapter 'named' returned something else than tensors"):
        _shown(RunRequest(case, "named"), 0, {"x": value})
