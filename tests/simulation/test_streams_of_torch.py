"""The streams of torch's own sharded training: in order as it is, and told where one of its waits is taken out."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    _runtime_utils,
    fully_shard,
    fully_sharded_data_parallel,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.execution import Failure
from fsdpcheck.simulation.programs.cuda import CudaAsCpu
from fsdpcheck.simulation.simulate import simulate

Patch = Callable[[], AbstractContextManager[object]]
_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
_UNITS = 3


def failure_of(program: Callable[[], object], world_size: int) -> Failure | None:
    def whole() -> object:
        dist.init_process_group("nccl")
        return program()

    done = simulate(whole, world_size, show=False, cuda_as_cpu=True)
    return done.failure


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(_UNITS)))


def train(module: nn.Module, before: Callable[[int], object] = lambda step: None) -> None:
    """Three steps in which the host waits for nobody."""
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    for step in range(3):
        before(step)
        module(torch.randn(4, 8, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(
    *, hybrid: bool = False, ahead: bool = False, accumulates: bool = False, again: bool = False, **options: Any
) -> Callable[[], None]:
    def program() -> None:
        if hybrid:
            shape = (2, dist.get_world_size() // 2)
            options["mesh"] = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
        units: Any = model()
        for place in range(_UNITS):
            units[place] = fully_shard(checkpoint_wrapper(units[place]) if again else units[place], **options)
        whole: Any = fully_shard(units, **options)
        if ahead:
            units[0].set_modules_to_forward_prefetch([units[1], units[2]])
            units[2].set_modules_to_backward_prefetch([units[1], units[0]])
        train(whole, lambda step: whole.set_requires_gradient_sync(step == 2) if accumulates else None)

    return program


def wrapped(**options: Any) -> Callable[[], None]:
    def program() -> None:
        units = (FullyShardedDataParallel(unit.cuda(), **options) for unit in model())
        train(FullyShardedDataParallel(nn.Sequential(*units), **options))

    return program


def parallel(**options: Any) -> Callable[[], None]:
    return lambda: train(DistributedDataParallel(model().cuda(), device_ids=[dist.get_rank()], **options))


def zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    module = DistributedDataParallel(model().cuda())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        module(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(8, 8).cuda(), rank, size, torch.device("cuda", rank))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    batch = torch.randn(8, 8, device="cuda")
    for _ in range(2):
        schedule.step(*([batch] if rank == 0 else []), target=batch)


def by_hand() -> None:
    """Each gradient is reduced as soon as it is there, and waited for before the step."""
    module, works = model().cuda(), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        module(torch.randn(4, 8, device="cuda")).sum().backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: dict[str, Callable[[], None]] = {
    "fully_shard": sharded(),
    "fully_shard, kept": sharded(reshard_after_forward=False),
    "fully_shard, explicit prefetch": sharded(ahead=True),
    "fully_shard, half": sharded(mp_policy=_HALF),
    "fully_shard, accumulates": sharded(accumulates=True),
    "fully_shard, checkpoints": sharded(again=True),
    "fully_shard, offloads": sharded(offload_policy=CPUOffloadPolicy()),
    "fully_shard, offloads, paged": sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hybrid": sharded(hybrid=True),
    "hybrid, half": sharded(hybrid=True, mp_policy=_HALF),
    "hybrid, accumulates": sharded(hybrid=True, accumulates=True),
    "FSDP1": wrapped(),
    "FSDP1, SHARD_GRAD_OP": wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "FSDP1, NO_SHARD": wrapped(sharding_strategy=ShardingStrategy.NO_SHARD),
    "FSDP1, half": wrapped(mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16)),
    "FSDP1, use_orig_params": wrapped(use_orig_params=True),
    "FSDP1, prefetch": wrapped(
        forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, limit_all_gathers=False
    ),
    "FSDP1, offloads": wrapped(cpu_offload=CPUOffload(True)),
    "DDP": parallel(),
    "DDP, many buckets": parallel(bucket_cap_mb=1e-4, gradient_as_bucket_view=True),
    "DDP, static graph": parallel(static_graph=True),
    "ZeroRedundancyOptimizer": zero,
    "pipeline": pipeline,
    "by hand": by_hand,
}
_BY_DAY = (("fully_shard", 2), ("FSDP1", 2), ("hybrid, half", 4))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, size, marks=() if (name, size) in _BY_DAY else pytest.mark.nightly)
        for name in PROGRAMS
        for size in (2, 4)
    ],
)
def test_torch_keeps_its_streams_in_order(name: str, world_size: int) -> None:
    assert failure_of(PROGRAMS[name], world_size) is None


# -- one wait of torch's taken out -----------------------------------------------------------------------------------


@contextmanager
def deaf(*streams: Any) -> Iterator[None]:
    """While open, these streams wait for nobody."""
    for stream in streams:
        stream.wait_stream = stream.wait_event = lambda other: None
    try:
        yield
    finally:
        for stream in streams:
            stream.__dict__.pop("wait_stream", None), stream.__dict__.pop("wait_event", None)


def instead(owner: Any, name: str, act: Callable[..., Any]) -> Patch:
    """``act(real, *arguments)`` in place of ``owner.name``, as torch's own code."""
    real, ours = getattr(owner, name), of_torch(act)
    return lambda: mock.patch.object(owner, name, of_torch(lambda *args, **options: ours(real, *args, **options)))


def of_torch(function: Any) -> Callable[..., Any]:
    """The function, as if a file of torch had it."""
    code = function.__code__.replace(co_filename=torch.__file__)
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def copies_out_at_once(real: Any, result: Any, *args: Any) -> Any:
    return real(result._replace(all_gather_event=None), *args)


def gathers_at_once(real: Any, params: Any, group: Any, waits: bool, copies: Any, gathers: Any, *args: Any) -> Any:
    with deaf(gathers):
        return real(params, group, waits, copies, gathers, *args)


def reduces_at_once(real: Any, params: Any, gradients: Any, group: Any, reduces: Any, *args: Any) -> Any:
    with deaf(reduces):
        return real(params, gradients, group, reduces, *args)


def ends_backward_at_once(real: Any, group: Any) -> None:
    group.comm_ctx._last_post_reduce_events = {}
    real(group)


def begins_forward_at_once(real: Any, state: Any, *args: Any) -> Any:
    state._lazy_init()
    with deaf(state._comm_ctx.all_gather_copy_in_stream, state._comm_ctx.all_gather_stream):
        return real(state, *args)


def keeps_no_event(real: Any, tensor: Tensor, event: Any) -> Any:
    return real(tensor, None)


def uses_at_once(real: Any, state: Any, *args: Any) -> Any:
    with deaf(state._device_handle.current_stream()):
        return real(state, *args)


_GROUP, _CLASS = _fsdp_param_group, _fsdp_param_group.FSDPParamGroup
BROKEN: dict[str, tuple[str, Callable[[], None], int, Patch]] = {
    "copy-out before the all-gather": (
        "stream race", sharded(), 2, instead(_GROUP, "foreach_all_gather_copy_out", copies_out_at_once)
    ),
    "all-gather before the copy-in": (
        "stream race", sharded(), 2, instead(_GROUP, "foreach_all_gather", gathers_at_once)
    ),
    "reduce-scatter before the copy-in": (
        "stream race", sharded(), 2, instead(_GROUP, "foreach_reduce", reduces_at_once)
    ),
    "optimizer before the gradients": (
        "stream race", sharded(mp_policy=_HALF), 2, instead(_CLASS, "finalize_backward", ends_backward_at_once)
    ),
    "next forward before the optimizer": (
        "stream race", sharded(), 2, instead(_fsdp_state.FSDPState, "_root_pre_forward", begins_forward_at_once)
    ),
    "gathered memory given back early": (
        "freed in use", sharded(), 2, instead(_CLASS, "_wait_all_gather_streams_on_event", lambda *_: None)
    ),
    "input of the reduce-scatter given back early": (
        "freed in use", sharded(), 2, instead(_GROUP, "ReduceScatterState", keeps_no_event)
    ),
    "input of the all-reduce given back early": (
        "freed in use", sharded(hybrid=True, mp_policy=_HALF), 4, instead(_GROUP, "AllReduceState", lambda *_: None)
    ),
    "FSDP1: forward before the all-gather": (
        "stream race", wrapped(), 2, instead(fully_sharded_data_parallel, "_pre_forward_unshard", uses_at_once)
    ),
    "FSDP1: next forward before the optimizer": (
        "stream race", wrapped(), 2, instead(_runtime_utils, "_wait_for_computation_stream", lambda *_: None)
    ),
    "FSDP1: optimizer before the gradients": (
        "stream race", wrapped(), 2, instead(_runtime_utils, "_post_backward_final_callback", uses_at_once)
    ),
    "FSDP1: record_stream left out": (
        "freed in use", wrapped(), 2, instead(CudaAsCpu, "_record_stream", lambda *_: None)
    ),
}  # fmt: skip
_BROKEN_BY_DAY = ("copy-out before the all-gather", "input of the all-reduce given back early")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _BROKEN_BY_DAY else pytest.mark.nightly) for name in BROKEN]
)
def test_a_wait_that_torch_lacks_is_told_at_a_line_of_the_program(name: str) -> None:
    kind, program, world_size, patch = BROKEN[name]
    with patch():
        failure = failure_of(program, world_size)
    assert failure is not None
    assert failure.kind == kind
    assert len(failure.ranks) == 2
    assert all(state.where.startswith(f"{__file__}:") for state in failure.ranks)
