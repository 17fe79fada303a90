"""The simulated engine: what it lets run, what it sees, and that it repeats."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpcheck.case import Arithmetic, Case, LayerSpec, MeshSpec, ModelSpec
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, SchedulePolicy

Body = Callable[[int, int, RankResult], None]


class Simulator:
    """Runs a plain function of (rank, world size, result) on simulated ranks."""

    def __init__(self) -> None:
        self.engine = SimulatedEngine(program=self._program)
        self.body: Body | None = None

    def _program(self, request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        assert self.body is not None
        self.body(rank, request.case.world_size, result)

    def __call__(self, body: Body, world_size: int = 2, schedule: SchedulePolicy = "forward") -> Execution:
        self.body = body
        case = Case(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=world_size))
        return self.engine.run(RunRequest(case, "fully_shard", schedule=schedule))


@pytest.fixture(scope="module")
def simulate() -> Iterator[Simulator]:
    simulator = Simulator()
    yield simulator
    simulator.engine.close()


def failure_of(execution: Execution, kind: str) -> str:
    assert execution.failure is not None, "the run completed"
    assert execution.failure.kind == kind, execution.failure.text
    return execution.failure.text


def keep(result: RankResult, **tensors: torch.Tensor) -> None:
    result.initial.update({name: tensor.clone() for name, tensor in tensors.items()})


# -- every collective computes what torch.distributed says ---------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_collectives_compute(simulate: Simulator, world_size: int) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        mine = torch.arange(size) + 10 * rank
        total = mine.clone()
        dist.all_reduce(total)
        largest = mine.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        gathered = torch.empty(size * size, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, mine)
        listed = [torch.empty(size, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(listed, mine)
        scattered = torch.empty(1, dtype=torch.int64)
        dist.reduce_scatter_tensor(scattered, mine)
        mean = torch.empty(1, dtype=torch.float64)
        dist.reduce_scatter_tensor(mean, mine.double(), op=dist.ReduceOp.AVG)
        sent = mine.clone()
        dist.broadcast(sent, src=size - 1)
        swapped = torch.empty_like(mine)
        dist.all_to_all_single(swapped, mine)
        objects: list[object] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(size)]
        dist.barrier()
        keep(result, total=total, largest=largest, gathered=gathered, listed=torch.cat(listed))
        keep(result, scattered=scattered, mean=mean, sent=sent, swapped=swapped)

    execution = simulate(body, world_size)
    assert execution.failure is None, execution.failure
    table = torch.arange(world_size) + 10 * torch.arange(world_size)[:, None]
    for rank, result in enumerate(execution.ranks):
        got = result.initial
        assert torch.equal(got["total"], table.sum(0))
        assert torch.equal(got["largest"], table.amax(0))
        assert torch.equal(got["gathered"], table.flatten())
        assert torch.equal(got["listed"], table.flatten())
        assert got["scattered"].item() == table.sum(0)[rank]
        assert got["mean"].item() == table.double().sum(0)[rank] / world_size
        assert torch.equal(got["sent"], table[-1])
        assert torch.equal(got["swapped"], table[:, rank])


def test_averages_can_be_premultiplied() -> None:
    """ "premultiply" is the sum of fl(x * fl(1/W)) in rank order; elsewhere it is fl(sum / W)."""
    values = torch.tensor([1.0, 3.0, 0.1, 7.0, 1e-3, 5.0, 1.5])

    def program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        own = values[rank].clone()
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        piece = torch.empty(1)
        dist.reduce_scatter_tensor(piece, values.repeat(7, 1).T[rank].contiguous(), op=dist.ReduceOp.AVG)
        keep(result, own=own, piece=piece, sent=values[rank])

    engine = SimulatedEngine(program=program)
    inverse, found = torch.ones(()) / 7, {}
    for averaging in ("divide", "premultiply"):
        case = Case(ModelSpec((LayerSpec(1),)), MeshSpec(7), arithmetic=Arithmetic(averaging=averaging))
        execution = engine.run(RunRequest(case, "fully_shard"))
        assert execution.failure is None, execution.failure.text
        assert {result.initial["own"].item() for result in execution.ranks} == {
            execution.ranks[0].initial["own"].item()
        }
        found[averaging] = execution.ranks[3].initial
    engine.close()
    total, premultiplied = torch.zeros(()), torch.zeros(())
    for value in values:
        total, premultiplied = total + value, premultiplied + value * inverse
    assert not torch.equal(total / 7, premultiplied)
    assert found["divide"]["own"] == found["divide"]["piece"][0] == total / 7
    assert found["premultiply"]["own"] == found["premultiply"]["piece"][0] == premultiplied
    assert found["premultiply"]["sent"] == values[3]


def test_rooted_collectives_compute(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        rows = [torch.empty(1) for _ in range(size)] if rank == 1 else None
        dist.gather(torch.full((1,), float(rank)), rows, dst=1)
        piece = torch.empty(1)
        dist.scatter(piece, [torch.full((1,), 7.0 + other) for other in range(size)] if rank == 0 else None, src=0)
        total = torch.ones(1)
        dist.reduce(total, dst=2)
        keep(result, rows=torch.cat(rows) if rows else torch.empty(0), piece=piece, total=total)

    execution = simulate(body, 3)
    assert execution.failure is None, execution.failure
    assert torch.equal(execution.ranks[1].initial["rows"], torch.arange(3.0))
    assert [result.initial["piece"].item() for result in execution.ranks] == [7.0, 8.0, 9.0]
    assert execution.ranks[2].initial["total"].item() == 3.0
    for result in execution.ranks[:2]:  # gloo leaves partial sums there: nobody may use them
        assert bool(result.initial["total"].isnan().all())


def test_groups_of_some_ranks_do_not_outlive_the_run(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        pair = dist.new_group([0, 2])
        value = torch.ones(1)
        if rank != 1:
            dist.all_reduce(value, group=pair)
        keep(result, value=value, groups=torch.tensor(len(dist.distributed_c10d._world.pg_map)))

    names = []
    for _ in range(2):
        execution = simulate(body, 3)
        assert execution.failure is None, execution.failure
        assert [result.initial["value"].item() for result in execution.ranks] == [2.0, 1.0, 2.0]
        assert [result.initial["groups"].item() for result in execution.ranks] == [2, 1, 2]
        names.append([call.group_name for call in execution.ranks[0].trace])
    assert names[0] == names[1]


def test_a_group_may_be_made_and_never_used(simulate: Simulator) -> None:
    execution = simulate(lambda rank, size, result: keep(result, size=torch.tensor(dist.new_group([0, 1]).size())), 2)
    assert execution.failure is None, execution.failure.text


def test_a_mesh_of_an_earlier_run_does_not_come_back(simulate: Simulator) -> None:
    """DTensor gives results the mesh of the first call like theirs: its groups are gone, or their names are others'."""

    def body(others: int, rank: int, size: int, result: RankResult) -> None:
        for _ in range(others):
            dist.new_group([0, 1, 2, 3])
        mesh = init_device_mesh("cpu", (2, 2))
        column = DTensor.from_local(torch.full((1,), float(rank)), mesh, [Replicate(), Shard(0)], run_check=False)
        keep(result, whole=column.detach().full_tensor())  # a detached DTensor has the mesh that was remembered

    for others in (0, 3, 1):
        execution = simulate(partial(body, others), 4)
        assert execution.failure is None, execution.failure.text
        assert [result.initial["whole"].tolist() for result in execution.ranks] == [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2


def test_point_to_point_says_that_it_is_not_offered(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            dist.send(torch.ones(1), dst=1)
        else:
            dist.recv(torch.ones(1), src=0)

    execution = simulate(body)
    assert "send" in failure_of(execution, "adapter")
    assert execution.failure is not None
    assert execution.failure.exception == "NotSupported"


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX])
def test_ranks_may_give_a_list_where_others_give_one_tensor(simulate: Simulator, op: dist.ReduceOp.RedOpType) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        mine = torch.arange(2.0) + 10 * rank
        everyone, piece = torch.zeros(size * 2), torch.zeros(2)
        terms = (torch.arange(size * 2.0) - size).pow(rank + 1) / 4
        if rank == 1:
            dist.all_gather(list(everyone.view(size, 2)), mine)
            dist.reduce_scatter(piece, list(terms.view(size, 2)), op=op)
        else:
            dist.all_gather_into_tensor(everyone, mine)
            dist.reduce_scatter_tensor(piece, terms, op=op)
        keep(result, everyone=everyone, piece=piece, terms=terms)

    execution = simulate(body, 3)
    assert execution.failure is None
    terms = torch.stack([result.initial["terms"] for result in execution.ranks])
    wanted = {dist.ReduceOp.SUM: terms.sum(0), dist.ReduceOp.AVG: terms.sum(0) / 3, dist.ReduceOp.MAX: terms.amax(0)}
    for rank, result in enumerate(execution.ranks):
        assert result.initial["everyone"].tolist() == [0, 1, 10, 11, 20, 21]
        assert torch.equal(result.initial["piece"], wanted[op].view(3, 2)[rank])


# -- the planted bugs of the table in docs, each seen with its cause -----------------------------------------------


def _skips(rank: int, size: int, result: RankResult) -> None:
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))


def test_a_skipped_call_is_a_deadlock_with_who_is_missing(simulate: Simulator) -> None:
    for world_size in (2, 5):
        execution = simulate(_skips, world_size)
        text = failure_of(execution, "deadlock")
        assert "all_reduce(float32[3])" in text
        assert "never called by rank" in text
        assert execution.failure is not None
        states = {state.rank: state for state in execution.failure.ranks}
        assert states[0].where.startswith(__file__)
        assert states[0].state == "blocked"
        assert all(states[rank].state == "finished" for rank in range(1, world_size))


def _op(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value) if rank else dist.broadcast(value, src=0)


def _reduce_op(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)


def _shape(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value[: 2 + rank])


def _dtype(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value if rank else value.double())


def _root(rank: int, value: torch.Tensor) -> None:
    dist.broadcast(value, src=rank)


@pytest.mark.parametrize(
    ("call", "field"),
    [(_op, "op"), (_reduce_op, "reduce op"), (_shape, "shape"), (_dtype, "dtype"), (_root, "root")],
)
def test_a_mismatch_is_one_finding_with_all_sides(
    simulate: Simulator, call: Callable[[int, torch.Tensor], None], field: str
) -> None:
    execution = simulate(lambda rank, size, result: call(rank, torch.ones(4)), 2)
    text = failure_of(execution, "mismatch")
    assert field in text.splitlines()[0]
    assert "rank 0" in text
    assert "rank 1" in text


class Layer:
    """A sharding unit of somebody's implementation: it knows its name."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn

    def gather(self) -> None:
        dist.all_gather_into_tensor(torch.empty(2 * dist.get_world_size()), torch.ones(2))


def test_equal_calls_about_different_units_are_a_mismatch(simulate: Simulator) -> None:
    first, second = Layer("blocks.0"), Layer("blocks.1")

    def body(rank: int, size: int, result: RankResult) -> None:
        for layer in (first, second) if rank != 1 else (second, first):
            layer.gather()

    text = failure_of(simulate(body, 3), "mismatch")
    assert "subject" in text.splitlines()[0]
    assert "blocks.0" in text
    assert "blocks.1" in text


def test_reading_before_the_wait_sees_poison(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        value = torch.ones(2)
        work = dist.all_reduce(value, async_op=True)
        early = value.clone()
        work.wait()
        keep(result, early=early, late=value)

    execution = simulate(body)
    assert execution.failure is None, execution.failure
    for result in execution.ranks:
        early = result.initial["early"]
        assert early[0] < -1e37
        assert bool(early[1].isnan())
        assert torch.equal(result.initial["late"], torch.full((2,), 2.0))


def test_writing_to_a_buffer_in_flight_is_seen(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        value = torch.ones(2)
        work = dist.all_reduce(value, async_op=True)
        if rank == 1:
            value.add_(1)
        work.wait()

    assert "rank 1 wrote" in failure_of(simulate(body), "in-flight")


@pytest.mark.parametrize("whole", [True, False])
def test_scaling_a_gradient_in_flight_is_seen_wherever_it_lies(simulate: Simulator, whole: bool) -> None:
    """Also through ``.data``, which counts no version, and in a view: arithmetic on NaN alone would leave NaN."""

    def body(rank: int, size: int, result: RankResult) -> None:
        gradient = torch.ones(2 if whole else 4)[:2]
        work = dist.all_reduce(gradient, async_op=True)
        gradient.data.div_(size)
        work.wait()

    assert "wrote to an input of shape [2]" in failure_of(simulate(body), "in-flight")


def test_the_memory_of_an_input_may_be_freed_in_flight(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        given, found = torch.ones(2), torch.empty(2 * size)
        work = dist.all_gather_into_tensor(found, given, async_op=True)
        given.untyped_storage().resize_(0)
        work.wait()
        keep(result, found=found)

    execution = simulate(body)
    assert execution.failure is None, execution.failure
    assert torch.equal(execution.ranks[0].initial["found"], torch.ones(4))


def test_writing_to_another_part_of_the_same_storage_is_not(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        buffer = torch.zeros(4)
        work = dist.all_reduce(buffer[:2], async_op=True)
        buffer[2:].fill_(1)
        work.wait()

    assert simulate(body).failure is None


def test_asynchronous_calls_of_two_groups_may_be_issued_in_either_order(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        groups = (one, two) if rank == 0 else (two, one)
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]
        for work in works:
            assert work is not None
            work.wait()

    assert simulate(body).failure is None


def test_blocking_calls_of_two_groups_in_opposite_order_are_a_deadlock(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (one, two) if rank == 0 else (two, one):
            dist.all_reduce(torch.ones(1), group=group)

    assert "rank 0 waits for rank 1 waits for rank 0" in failure_of(simulate(body), "deadlock")


# -- ranks that end badly ------------------------------------------------------------------------------------------


def test_an_exception_on_one_rank_is_one_failure(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            raise ValueError("boom")
        dist.barrier()

    execution = simulate(body, 3)
    text = failure_of(execution, "raised")
    assert "ValueError: boom" in text
    assert execution.failure is not None
    assert execution.failure.exception == "ValueError"
    assert {state.state for state in execution.failure.ranks if state.rank != 1} == {"blocked"}


@pytest.mark.parametrize("leave", [sys.exit, lambda code: os._exit(code)], ids=["sys.exit", "os._exit"])
def test_a_rank_that_exits_is_a_failure_and_no_exit(simulate: Simulator, leave: Callable[[int], None]) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            leave(3)
        dist.barrier()

    assert "rank 1 left with exit code 3" in failure_of(simulate(body), "exited")


def test_after_a_failure_the_next_run_is_clean(simulate: Simulator) -> None:
    def fine(rank: int, size: int, result: RankResult) -> None:
        value = torch.ones(1)
        dist.all_reduce(value)
        keep(result, value=value)

    before = simulate(fine, 3)
    failure_of(simulate(_skips, 3), "deadlock")
    after = simulate(fine, 3)
    assert after.failure is None
    assert [rank.trace for rank in after.ranks] == [rank.trace for rank in before.ranks]
    assert not dist.is_initialized()


def test_a_rank_that_never_stops_computing_is_no_progress_not_a_deadlock() -> None:
    stop = False

    def program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        while rank == 1 and not stop:
            pass
        dist.barrier()

    engine = SimulatedEngine(program=program, budget_seconds=0.05)
    execution = engine.run(RunRequest(Case(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=2)), "fully_shard"))
    stop = True
    assert "rank 1: running" in failure_of(execution, "no progress")


def test_a_run_inside_a_run_is_refused(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        with pytest.raises(UsageError):
            simulate(_skips)

    assert simulate(body, 1).failure is None


# -- what ranks believe is their own -------------------------------------------------------------------------------


def test_process_globals_belong_to_one_rank(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        warnings.simplefilter("ignore" if rank else "error")
        dist.barrier()
        assert os.environ["RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == str(size)
        assert torch.get_default_dtype() is (torch.float64 if rank else torch.float32)
        assert warnings.filters[0][0] == ("ignore" if rank else "error")
        drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
        dist.barrier()
        drawn += [torch.rand(1).item(), random.random(), np.random.rand()]
        keep(result, drawn=torch.tensor(drawn, dtype=torch.float64))

    outside = (os.environ.get("RANK"), torch.get_default_dtype(), list(warnings.filters), random.getstate())
    execution = simulate(body, 3)
    assert execution.failure is None, execution.failure
    assert outside == (os.environ.get("RANK"), torch.get_default_dtype(), list(warnings.filters), random.getstate())
    for rank, result in enumerate(execution.ranks):
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            kept = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64 if rank else torch.float32)
            ours, theirs = random.Random(rank), np.random.RandomState(rank)
            wanted = [torch.rand(1).item(), ours.random(), theirs.rand()]
            wanted += [torch.rand(1).item(), ours.random(), theirs.rand()]
            torch.set_default_dtype(kept)
        assert result.initial["drawn"].tolist() == wanted


def _settings() -> dict[str, object]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "hook": sys.excepthook,
        "logging": logging.root.manager.disable,
        "folder": os.getcwd(),
    }


def test_settings_belong_to_one_rank(simulate: Simulator, tmp_path: Path) -> None:
    """Ranks that set everything, and one that sets nothing and sees nothing of it; afterwards all is back."""
    outside = _settings()

    def body(rank: int, size: int, result: RankResult) -> None:
        before = _settings()
        if rank != 1:
            torch.use_deterministic_algorithms(True, warn_only=rank == 0)
            torch.set_float32_matmul_precision("high" if rank else "medium")
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            sys.stdout, sys.stderr, sys.excepthook = io.StringIO(), io.StringIO(), lambda *_: None
            logging.disable(10 + rank)
            os.chdir(tmp_path if rank else tmp_path.parent)
        mine = _settings()
        same = {name for name, value in mine.items() if before[name] == value}
        assert same == (set(before) if rank == 1 else {"warn only"} if rank == 2 else set())
        for _ in range(2):
            dist.barrier()
            assert _settings() == mine

    execution = simulate(body, 3)
    assert execution.failure is None, execution.failure.text
    assert _settings() == outside


# -- unmodified programs, repeated ---------------------------------------------------------------------------------


def _fsdp2(rank: int, size: int, result: RankResult) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.arange(6.0, dtype=torch.float64).view(2, 3) + rank + step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    keep(result, **{name: value.full_tensor().detach() for name, value in model.named_parameters()})  # type: ignore[operator]


def test_fsdp2_repeats_bit_for_bit_under_both_schedules(simulate: Simulator) -> None:
    first, again, turned = simulate(_fsdp2, 3), simulate(_fsdp2, 3), simulate(_fsdp2, 3, "reversed")
    for other in (again, turned):
        assert other.failure is None, other.failure
        for one, two in zip(first.ranks, other.ranks, strict=True):
            assert one.trace == two.trace
            assert all(torch.equal(one.initial[name], two.initial[name]) for name in one.initial)
    assert first.voids == ()
    subjects = [call.subject for call in first.ranks[0].trace if call.op == "reduce_scatter"]
    assert subjects == ["2", "0", "2", "0"]


def test_polling_and_the_store_void_the_claim_for_all_schedules(simulate: Simulator) -> None:
    def polls(rank: int, size: int, result: RankResult) -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        while not work.is_completed():
            pass

    assert simulate(polls).voids == ("a work was polled",)

    def stores(rank: int, size: int, result: RankResult) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key {rank}", "x")
        store.get(f"key {1 - rank}")

    execution = simulate(stores)
    assert execution.failure is None, execution.failure
    assert "store.get was used after init" in execution.voids


def test_waiting_for_a_key_nobody_sets_is_a_deadlock(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            dist.distributed_c10d._get_default_store().get("never")

    assert "never" in failure_of(simulate(body), "deadlock")


def test_a_call_nobody_answers_is_found_although_the_run_completed(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)

    execution = simulate(body)
    assert "never" in failure_of(execution, "unsafe")
    assert "a call was never waited for" in execution.voids


def test_calls_of_several_groups_under_way_void_the_claim_for_all_schedules(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        first, second = (one, two) if rank == 0 else (two, one)
        work = dist.all_reduce(torch.ones(1), group=first, async_op=True)
        dist.all_reduce(torch.ones(1), group=second, async_op=rank == 1)
        assert work is not None
        work.wait()

    assert "calls on several groups were under way together" in simulate(body).voids
