"""Dispatch modes, profilers and the compiler of a rank see of its collectives what they see on gloo."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from fsdpcheck import simulate
from fsdpcheck.execution import SchedulePolicy
from tests.common.commands import run, start
from tests.common.releases import all_gather_single, reduce_scatter_single


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which operators are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _every_collective() -> list[float]:
    size, rank = dist.get_world_size(), dist.get_rank()
    one, all_ = torch.full((1,), rank + 1.0), torch.arange(float(size))
    dist.all_reduce(one)
    dist.broadcast(one, 0)
    dist.reduce(torch.empty_like(one), 0)
    dist.barrier()
    all_gather_single(all_, one)
    dist.all_gather([*all_.split(1)], one)
    reduce_scatter_single(one, all_)
    dist.reduce_scatter(one, [*all_.split(1)])
    dist.gather(one, [*all_.split(1)] if rank == 0 else None)
    dist.scatter(one, [*all_.split(1)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty_like(all_), all_)
    work = dist.all_reduce(one, async_op=True)
    assert work is not None
    work.wait()
    return [*one.tolist(), *all_.tolist()]


CALLED = (
    *("allreduce_", "broadcast_", "reduce_", "barrier", "_allgather_base_", "allgather_", "_reduce_scatter_base_"),
    *("reduce_scatter_", "gather_", "scatter_", "alltoall_base_", "allreduce_"),
)


def test_modes_see_the_operators_of_c10d_and_nothing_of_how_ranks_meet() -> None:
    def program() -> object:
        dist.init_process_group("gloo")
        wanted = _every_collective()
        alone, outer, inner = Seen(), Seen(), Seen()
        with alone:
            assert _every_collective() == wanted
        with outer, inner:
            assert _every_collective() == wanted
        assert alone.names == outer.names == inner.names
        assert _every_collective() == wanted
        return alone.names

    for names in simulate(program, 2).check().returned:
        assert [name for name in names if "c10d" in name] == [f"c10d.{name}.default" for name in CALLED]
        assert {name for name in names if "c10d" not in name} == {
            *("aten.full.default", "aten.arange.default", "aten.empty_like.default", "aten.split.Tensor"),
            "aten.empty.memory_format",  # of a barrier
        }


def test_a_mode_may_keep_a_call_from_being_made() -> None:
    class Instead(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.c10d.barrier.default:
                return FakeWork().boxed()
            if func.namespace == "c10d":
                raise KeyError(str(func))
            return func(*args, **(kwargs or {}))

    def program() -> float:
        dist.init_process_group("gloo")
        value = torch.ones(1)
        with Instead():  # type: ignore[no-untyped-call]
            if dist.get_rank() == 0:
                dist.barrier()
            with pytest.raises(KeyError, match=r"c10d\.allreduce_"):
                dist.all_reduce(value)
        dist.all_reduce(value)
        return value.item()

    assert simulate(program, 2).check().returned == (2.0, 2.0)


@pytest.mark.parametrize("schedule", ["forward", "reversed"])
def test_a_rank_is_in_a_mode_while_it_has_entered_one(schedule: SchedulePolicy) -> None:
    """A process has one flag that says so, and torch.compile does nothing as long as it is set."""

    def program() -> object:
        dist.init_process_group("gloo")
        flags = []
        for rank in (0, 1):
            with Seen() if dist.get_rank() == rank else nullcontext():
                dist.barrier()
                flags.append(is_in_torch_dispatch_mode())
            flags.append(is_in_torch_dispatch_mode())
        return flags

    done = simulate(program, 2, schedule=schedule).check()
    assert done.returned == ([True, False, False, False], [False, False, True, False])
    assert not is_in_torch_dispatch_mode()


def test_communication_is_counted_where_it_happens() -> None:
    """In the second step DistributedDataParallel tells the order of its buckets; so do gloo's ranks."""
    from torch.distributed.tensor.debug import CommDebugMode  # which imports the compiler

    def program() -> object:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        counts = []
        for _ in range(3):
            mode = CommDebugMode()  # type: ignore[no-untyped-call]
            with mode:
                model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            counts.append({str(op): count for op, count in mode.get_comm_counts().items()})
        return counts

    plain = {"c10d.allreduce_": 1}
    assert simulate(program, 2).check().returned == ([plain, {**plain, "c10d.broadcast_": 2}, plain],) * 2


PROFILED = """
import json
import torch, torch.distributed as dist
from torch.profiler import profile, record_function

dist.init_process_group("gloo")
rank = dist.get_rank()

def show(profiler):
    own = [event for event in profiler.events() if event.name.partition(":")[0] in ("gloo", "c10d", "own")]
    profiler.export_chrome_trace(f"trace{rank}")
    with open(f"trace{rank}") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {event.name for event in own} <= names, names
    assert not names & {"aten::clone", "aten::add_", "aten::copy_"}, names
    print([(event.name, event.input_shapes, event.is_async) if event.is_async else event.name for event in own])

first, second = profile(record_shapes=True), profile()
first.start()
with record_function(f"own:{rank}"):
    dist.all_reduce(torch.ones(3, 2))
if rank == 1:
    first.stop()
    second.start()
dist.broadcast(torch.ones(4), 0)
dist.barrier()
if rank == 0:
    first.stop()
dist.barrier()
show(first)
if rank == 1:
    second.stop()
    show(second)
"""


def test_every_rank_may_profile_whenever_it_likes(tmp_path: Path) -> None:
    """In a process of its own, for torch's profiler leaves a thread."""
    (tmp_path / "profiled.py").write_text(PROFILED)
    code, out, err = run(tmp_path, "simulate", "profiled.py", "-n", "2")
    assert code == 0, out + err
    sums = "'c10d::allreduce_', ('gloo:all_reduce', [[3, 2]], True)"
    rest = "'c10d::broadcast_', ('gloo:broadcast', {}, True), 'c10d::barrier', ('gloo:barrier', [], True)"
    barrier = ", 'c10d::barrier', ('gloo:barrier', [], True)"
    printed = [line for line in out.splitlines() if line.startswith("[rank ")]
    assert sorted(printed) == sorted(
        [
            f"[rank 0] ['own:0', {sums}, {rest.format([[4]])}]",
            f"[rank 1] ['own:1', {sums}]",
            f"[rank 1] [{rest.format([])}{barrier}]",
        ]
    )


COMPILED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
linear = torch.nn.Linear(2, 1, bias=False)
compiled = torch.compile(torch.nn.parallel.DistributedDataParallel(linear), backend="eager")
for step in range(2):
    compiled(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
files = [compiled.co_filename for compiled in torch._dynamo.utils.get_compilation_metrics()]
assert files
print(linear.weight.grad.tolist(), [file for file in files if "fsdpcheck" in file])
"""


@pytest.mark.nightly
def test_a_compiled_program_is_compiled_without_what_ranks_meet_in(tmp_path: Path) -> None:
    """Two steps give the average of ranks, 1.5, twice. A program of its own, in which nothing has compiled yet."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    process = start(tmp_path, "simulate", "compiled.py", "-n", "2")
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert sorted(out.splitlines()[:2]) == [f"[rank {rank}] [[3.0, 3.0]] []" for rank in range(2)]
