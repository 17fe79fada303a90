"""What a simulated group answers as its own backend: all that gloo's has a name for, and what gloo says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdpcheck import simulate
from fsdpcheck.execution.tensor_rules import GLOO_DTYPES
from tests.common.releases import all_gather_single

CPU, TIME = torch.device("cpu"), timedelta(seconds=9)


def _has(thing: object, name: str) -> bool:
    try:
        return hasattr(thing, name)
    except Exception:  # it is there and refuses
        return True


def test_no_name_of_a_group_a_backend_or_a_work_is_unknown() -> None:
    def program() -> list[str]:
        dist.init_process_group("gloo")
        group: Any = dist.group.WORLD
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        named = [(group, kind) for kind in (dist.ProcessGroup, c10d.Backend, c10d.ProcessGroupGloo)]
        return [
            f"{kind.__name__}.{name}"
            for thing, kind in [*named, (work, dist.Work)]
            for name in dir(kind)
            if not _has(thing, name)
        ]

    assert simulate(program, 1).check().returned == ([],)


CALLS = (
    *("supports_shrinking", "supports_coalescing", "supports_time_estimate", "supports_tensor_alloc(CPU)"),
    *("mem_allocator", "allocate_tensor(4, dtype=torch.float32, device=CPU)", "memory_stats()", "suspend()"),
    *("resume()", "shrink([0], 0)", "eager_connect_single_device(CPU)", "setUsePgForSymmMemRendezvous(False)"),
    *("_set_default_timeout(TIME)", "name()", "rank()", "size()", "Options", "Device"),
    *("options.backend", "options.global_ranks_in_group", "_start_coalescing()", "_end_coalescing()"),
)


def _answers(backend: Any) -> dict[str, str]:
    """By call, what it gives, or what it raises."""
    found = {}
    for call in CALLS:
        if not _has(c10d.ProcessGroupGloo, call.partition(".")[0].partition("(")[0]):
            continue  # in an older torch
        try:
            found[call] = repr(eval(f"backend.{call}", {"backend": backend, **globals()}))
        except RuntimeError as error:
            found[call] = f"{type(error).__name__}: {error}"
    return found


def test_what_a_backend_can_is_answered_as_by_gloo() -> None:
    def program() -> dict[str, str]:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        return _answers(dist.group.WORLD._get_backend(CPU))

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert dist.group.WORLD is not None
        wanted = _answers(dist.group.WORLD._get_backend(CPU))
    finally:
        dist.destroy_process_group()
    assert simulate(program, 1).check().returned[0] == wanted


def test_what_ranks_cannot_do_says_so_by_name() -> None:
    def program(call: str) -> None:
        dist.init_process_group("gloo")
        eval(call, {"group": dist.group.WORLD, "work": dist.barrier(async_op=True), **globals()})

    for call, words in {
        "group._register_backend(CPU, group.BackendType.GLOO, None)": "_register_backend is not offered",
        "group.split_group([0])": "split_group is not offered",
        "group._wait_for_pending_works()": "Only ProcessGroupNCCL supports waitForPendingWorks, but got gloo",
        "group._register_on_completion_hook(print)": "Only ProcessGroupNCCL supports onCompletion hook, but got gloo",
        "work._source_rank()": "only be called on a work of recv",
    }.items():
        failure = simulate(program, 1, [call]).failure
        assert failure is not None
        assert words in failure.text


def test_a_group_has_the_store_that_made_it_and_coalesces_where_nccl_was_asked_for() -> None:
    def program(backend: str) -> tuple[bool, bool]:
        dist.init_process_group(backend)
        group: Any = dist.group.WORLD
        group.get_group_store().set("key", "value")
        return group.get_group_store().get("key") == b"value", group.supports_coalescing

    assert simulate(program, 1, ["gloo"]).check().returned == ((True, False),)
    assert simulate(program, 1, ["nccl"]).check().returned == ((True, True),)


@pytest.mark.parametrize("from_the_group", [False, True])
def test_fully_shard_may_ask_the_group_for_its_buffers(from_the_group: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    def program() -> list[float]:
        dist.init_process_group("gloo")
        model: Any = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        fully_shard(model)
        if from_the_group:
            model.set_allocate_memory_from_process_group_for_comm(True)
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        return model.weight.grad.full_tensor().flatten().tolist()  # type: ignore[no-any-return]

    assert simulate(program, 2, show=False).check().returned == ([1.5] * 4,) * 2


def _moves() -> dict[str, bool]:
    """By call and dtype, whether the group takes it; every call on one rank."""
    found = {}
    for dtype in {torch.float8_e4m3fn, torch.int16, torch.uint16, torch.complex64, *GLOO_DTYPES}:
        for name, call in {
            "all_reduce": lambda t: dist.all_reduce(
                t, op=dist.ReduceOp.AVG if t.is_complex() else dist.ReduceOp.PRODUCT
            ),
            "broadcast": lambda t: dist.broadcast(t, 0),
            "all_gather": lambda t: dist.all_gather([torch.empty_like(t)], t),
            "all_gather_single": lambda t: all_gather_single(torch.empty_like(t), t),
            "gather": lambda t: dist.gather(t, [torch.empty_like(t)]),
            "scatter": lambda t: dist.scatter(torch.empty_like(t), [t]),
        }.items():
            try:
                call(torch.ones(2).to(dtype))
                found[f"{name} {dtype}"] = True
            except RuntimeError:
                found[f"{name} {dtype}"] = False
    return found


def test_collectives_take_the_dtypes_that_gloo_takes_where_gloo_was_asked_for() -> None:
    def program(backend: str) -> dict[str, bool]:
        dist.init_process_group(backend)
        return _moves()

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wanted = _moves()
    finally:
        dist.destroy_process_group()
    assert False in wanted.values()
    assert simulate(program, 1, ["gloo"]).check().returned[0] == wanted
    assert simulate(program, 1, ["nccl"]).check().returned[0]["broadcast torch.int16"]
