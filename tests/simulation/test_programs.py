"""Programs of plain torch get on simulated ranks what torch defines; what is expected follows from the program."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from fsdpcheck import simulate as simulated
from fsdpcheck.compat import groups_private
from fsdpcheck.execution import Execution, RankResult, SchedulePolicy
from tests.simulation.simulator import Simulator, failure_of, keep


def values(execution: Execution) -> list[Tensor]:
    """What each rank kept as ``value``."""
    assert execution.failure is None, execution.failure.text
    return [rank.initial["value"] for rank in execution.ranks]


def test_a_work_that_only_c_plus_plus_keeps_can_be_waited_for(simulate: Simulator) -> None:
    """join keeps the work of its all-reduce in C++; rank 0 leaves after one step, rank 1 after two."""

    def body(rank: int, size: int, result: RankResult) -> None:
        linear = nn.Linear(2, 1, bias=False)
        model = nn.parallel.DistributedDataParallel(linear)
        with model.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                linear.weight.grad = None
                model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert linear.weight.grad is not None
        keep(result, value=linear.weight.grad)

    assert [value.tolist() for value in values(simulate(body))] == [[[1.5, 1.5]], [[2.0, 2.0]]]


def test_a_work_that_nobody_keeps_holds_no_tensors(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        for _ in range(2):
            buffer = torch.ones(2)
            dist.all_reduce(buffer)
            dist.barrier()  # until then the others may still read it
            alive = weakref.ref(buffer)
            del buffer
            assert alive() is None

    execution = simulate(body)
    assert execution.failure is None, execution.failure.text


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_of_a_rank_ends_and_is_no_rank(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            fork = multiprocessing.get_context("fork")
            codes = []
            for target, arguments in ((int, ()), (os._exit, (3,))):
                child = fork.Process(target=target, args=arguments)
                child.start()
                child.join()
                codes.append(child.exitcode)
            keep(result, value=torch.tensor(codes))
        else:
            keep(result, value=torch.cat(list(DataLoader(torch.arange(3), num_workers=1))))
        dist.barrier()

    assert [value.tolist() for value in values(simulate(body))] == [[0, 3], [0, 1, 2]]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.parametrize("call", ["barrier", "init_process_group", "new_group"])
def test_a_forked_child_that_communicates_is_refused_by_name_though_nobody_looks_at_it(call: str) -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        child = multiprocessing.get_context("fork").Process(target=_calls_in_silence, args=(call,))
        child.start()
        child.join()

    failure = simulated(program, 2).failure
    assert failure is not None
    assert failure.kind == "adapter"
    assert "a process that a rank has forked uses torch.distributed" in failure.text


def _calls_in_silence(call: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if call == "init_process_group":
        dist.destroy_process_group()
    getattr(dist, call)()


def test_every_backend_that_a_rank_asks_for_is_the_simulated_one(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        sums = []
        for backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl", None):
            group = dist.new_group(backend=backend)
            assert dist.get_backend(group) == (backend or groups_private.BACKEND)
            assert group.name() == {"cpu:gloo,cuda:nccl": "gloo"}.get(str(backend), dist.get_backend(group))
            assert group._get_backend(torch.device("cpu")) is group
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
            assert group._get_sequence_number_for_group() == 0
            value = torch.tensor(float(rank + 1))
            dist.all_reduce(value, group=group)
            assert group._get_sequence_number_for_group() == 1
            sums.append(value)
        mesh = init_device_mesh("cpu", (size,), backend_override={0: "gloo"})
        dist.all_reduce(sums[0], group=mesh.get_group())
        keep(result, value=torch.stack(sums))

    assert [value.tolist() for value in values(simulate(body))] == [[6.0, 3.0, 3.0, 3.0]] * 2


def test_a_rank_may_destroy_its_groups_and_initialise_again(simulate: Simulator, tmp_path: Path) -> None:
    def again(rank: int, size: int, result: RankResult) -> None:
        value = torch.tensor(float(rank + 1))
        urls = (f"file://{tmp_path}/meet", "tcp://127.0.0.1:29999", "env://")
        for backend, url in zip(("gloo", "cpu:gloo,cuda:nccl", None), urls, strict=True):
            dist.all_reduce(value)
            dist.destroy_process_group()
            dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)
        dist.destroy_process_group()
        dist.init_process_group()
        dist.all_reduce(value, group=dist.new_group([0, 1]))
        keep(result, value=value)

    def destroys(rank: int, size: int, result: RankResult) -> None:
        dist.destroy_process_group()

    def sums(rank: int, size: int, result: RankResult) -> None:
        dist.all_reduce(value := torch.ones(1))
        keep(result, value=value)

    execution = simulate(again)
    assert [value.tolist() for value in values(execution)] == [24.0, 24.0]
    assert [call.sequence for call in execution.ranks[0].trace] == [0, 1, 2, 0]
    assert simulate(destroys).failure is None
    assert [value.tolist() for value in values(simulate(sums))] == [[2.0], [2.0]]
    assert [call.sequence for call in simulate(sums).ranks[0].trace] == [0]


def test_a_sharded_tensor_is_gathered_on_the_device_of_its_backend(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        spec = ChunkShardingSpec(0, [f"rank:{other}/cpu" for other in range(size)])
        for group in (None, dist.new_group(backend="gloo")):
            tensor = sharded_tensor.full(spec, (4, 2), 3.0, process_group=group)
            whole = torch.empty(4, 2) if rank == 0 else None
            tensor.gather(out=whole)
            keep(result, value=torch.zeros(()) if whole is None else whole.sum())

    assert [value.item() for value in values(simulate(body))] == [24.0, 0.0]


def test_a_rank_cannot_renumber_itself(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29999", rank=size - 1 - rank, world_size=size)

    assert "got     rank 1 of 2" in failure_of(simulate(body), "adapter")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_are_written_behind_the_back_of_autograd(simulate: Simulator, asynchronous: bool) -> None:
    """As on gloo: no complaint, and the values that backward uses are the written ones."""

    def body(rank: int, size: int, result: RankResult) -> None:
        weight = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
        activation = (weight * 2).sigmoid()
        work = dist.all_reduce(activation.detach(), async_op=asynchronous)
        gathered = weight * 3
        view = gathered.detach()[:2]
        dist.all_gather_into_tensor(view, torch.tensor([float(rank)]))
        if work is not None:
            work.wait()
        (activation * gathered).sum().backward()
        assert activation._version == gathered._version == 0
        assert weight.grad is not None
        keep(result, value=gathered)

    assert [value.tolist() for value in values(simulate(body))] == [[0.0, 1.0, 6.0]] * 2


@pytest.mark.parametrize("schedule", ["forward", "reversed"])
def test_defaults_of_a_module_of_torch_that_ranks_import_are_the_groups_of_the_rank_that_calls(
    schedule: SchedulePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.nn.functional", raising=False)

    def program() -> list[float]:
        dist.init_process_group("gloo")
        functional = importlib.import_module("torch.distributed.nn.functional")
        value = torch.full((1,), dist.get_rank() + 1.0, requires_grad=True)
        total = functional.all_reduce(value * 2)
        total.backward()
        assert value.grad is not None
        return [total.item(), value.grad.item()]

    assert simulated(program, 2, schedule=schedule).check().returned == ([6.0, 4.0],) * 2


def test_rpc_is_refused_by_name() -> None:
    def program() -> None:
        from torch.distributed import rpc

        rpc.init_rpc("one", rank=int(os.environ["RANK"]), world_size=2)

    failure = simulated(program, 2).failure
    assert failure is not None
    assert (failure.kind, failure.text.splitlines()[0]) == (
        "adapter",
        "simulated ranks have no torch.distributed.rpc",
    )
