"""What torch keeps private of its CUDA side and is touched to play it on the CPU. Tried: 2.13.0, built without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch

from fsdpcheck.compat.torch_private import replaced

PARSE_TO: Any = cast(Any, torch)._C._nn._parse_to
"""Reads the arguments of ``Module.to``, and is handed to function modes as a function of torch."""


@contextmanager
def guard_that_outlives_threads() -> Iterator[None]:
    """While open, no thread puts a device guard of its own into the process's table, where the next would read it.

    torch built for CUDA, where no GPU is seen: with every fake mode that is entered (each operator on a sharded tensor
    enters one), releases before 2.12 put a guard there that ends with the thread, and the next fake mode reads freed
    memory (pytorch/pytorch#178950; 12 crashes in a run of 4,200 tests on 2.11.0). Here none is put there: it is for
    fake tensors of "cuda", and with it autograd starts a thread for CUDA, after which no forked process may call
    backward. Where a GPU is seen torch puts none there by itself. Tried: 2.13.0.
    """
    c: Any = cast(Any, torch)._C
    if torch.version.cuda is None or not hasattr(c, "_ensureCUDADeviceGuardSet"):
        yield
        return
    with replaced(c, _ensureCUDADeviceGuardSet=lambda: None):
        yield


NO_SYNC_BATCH_NORM = "_passing_sync_batchnorm_handle"
"""The method by which ``DistributedDataParallel`` refuses ``SyncBatchNorm`` on the CPU."""


def modules() -> list[ModuleType]:
    """The modules of torch in which a name of ``torch.cuda`` is found a second time."""
    cuda: Any = torch.cuda
    return [cuda, cuda.memory, cuda.random, cuda.streams, cuda.nccl, cuda.nvtx, cuda.profiler, cuda.graphs]


RECORD_STREAM = "_no_dispatch_record_stream"
"""The function by which FSDP1 calls ``Tensor.record_stream``, of tensors on a GPU alone."""


def who_record_streams() -> list[ModuleType]:
    """The modules in which that is found."""
    from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils

    return [_common_utils, _flat_param, _runtime_utils]


@contextmanager
def initialised(refuse: Callable[[], object]) -> Iterator[None]:
    """While open, what waits for CUDA to be initialised is done at once; what asks C++ for it calls ``refuse``."""

    def call(function: Callable[[], object], **options: Any) -> None:
        function()

    with replaced(torch.cuda, _lazy_init=refuse, _lazy_call=call):
        yield


@contextmanager
def device_contexts(change: Callable[[Any], Any], made: Callable[[Any, Any], object]) -> Iterator[None]:
    """While open, ``with torch.device(...)`` and ``torch.set_default_device`` mean what ``change`` makes of theirs.

    Their mode lies below all others, so no other sees the device they put in; ``made`` is given each function for which
    they put in one that was changed, and what it has made.
    """
    from torch.utils._device import DeviceContext, _device_constructors

    make: Any = DeviceContext.__init__
    call: Any = DeviceContext.__torch_function__
    changed: set[int] = set()

    def make_ours(context: Any, device: Any) -> None:
        make(context, ours := change(device))
        (changed.add if ours is not device else changed.discard)(id(context))

    def call_ours(context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(context, func, types, args, kwargs)
        if id(context) in changed and func in _device_constructors() and (kwargs or {}).get("device") is None:
            made(func, result)
        return result

    with replaced(DeviceContext, __init__=make_ours, __torch_function__=call_ours):
        yield


def sync_batch_norm(*args: Any) -> torch.Tensor:
    """What ``SyncBatchNorm`` computes where it has to communicate."""
    from torch.nn.modules._functions import SyncBatchNorm

    return cast(torch.Tensor, cast(Any, SyncBatchNorm).apply(*args))
