"""Native process groups: gloo for tensors on the processors or on GPUs, NCCL for tensors on GPUs.

NCCL only queues a call, so a rank that waits for others without end stands wherever it next asks its GPU for something.
Here ranks wait for the GPU where they wait for the call; and communicators, which NCCL makes when they are first used,
are made with their group, so that only messages can block while they are issued.

Tried: gloo on the processors, 2.13.0. gloo with CUDA tensors and NCCL: read only (ProcessGroupNCCL.cpp of 2.11 and
2.13), but for the rows of ``python -m benchmarks gpu`` that docs/gpu.json holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch._C._distributed_c10d as c10d

from fsdpcheck.engines._common.metal import Metal
from fsdpcheck.execution.trace import Collective

NEVER: Final = timedelta(days=30)
"""A backend's own time-out, out of the way: a hang is proved from the table, long before."""
_CPU: Final = torch.device("cpu")
_WATCHDOGS: Final = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""torch's own threads that end a process whose collective takes long: who ends it here is who proves that it hangs."""


class Native:
    """A backend's group of this process. ``device``: where its tensors lie."""

    is_nccl = False

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device

    def barrier(self, opts: Any) -> Any:
        """A work."""
        return self.group.barrier(opts if opts is not None else c10d.BarrierOptions())

    def connects(self, call: Collective) -> bool:
        """Whether to issue the call waits for another rank, as to wait for it does."""
        return False

    def begin_together(self) -> None:
        """Calls from now on are issued as one."""

    def end_together(self) -> Any:
        """The work of all calls since then."""

    def settle(self) -> None:
        """Return when all that the rank has waited for is over on its device too."""


class NativeNccl(Native):
    """NCCL's: one GPU a rank."""

    is_nccl = True

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self._met: set[tuple[int, ...]] = set()

    def barrier(self, opts: Any) -> Any:
        """Of this rank's GPU, which torch would guess from the rank."""
        options = opts if opts is not None else c10d.BarrierOptions()
        options.device_ids = [self.device.index]
        return self.group.barrier(options)

    def connects(self, call: Collective) -> bool:
        """The first message between two ranks makes them a communicator, for which each waits for the other.

        Later ones do not; who is said to wait in them would be thought to hang while it computes.
        """
        pair = tuple(sorted(call.group))
        is_first = call.tag is not None and pair not in self._met
        self._met |= {pair} if is_first else set()
        return is_first

    def begin_together(self) -> None:
        self.group._start_coalescing(self.device)

    def end_together(self) -> Any:
        return self.group._end_coalescing(self.device)

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


Connect = Callable[[Any, int, int, timedelta], Native]
"""(store, rank, size, time-out) -> a group; blocks until all members have come."""


def connecting(metal: Metal, device: torch.device, address: str) -> Connect:
    """How ranks on ``metal`` make groups, of which this one computes on ``device`` and is found at ``address``."""
    if metal.backend == "nccl":
        return partial(over_nccl, device=device)
    return partial(over_gloo, address=address, device=device)


def over_gloo(
    store: Any, rank: int, size: int, timeout: timedelta, address: str = "127.0.0.1", device: torch.device = _CPU
) -> Native:
    """A group over gloo whose other members find this one at ``address``."""
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options._threads = 2
    return Native(c10d.ProcessGroupGloo(store, rank, size, options), device)


def over_nccl(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device | None = None) -> Native:
    """A group over NCCL, on the current GPU if none is named."""
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    os.environ.update(_WATCHDOGS)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return NativeNccl(group, device)
