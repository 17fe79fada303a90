"""What a simulated group answers as its own backend: torch asks a group's backend what it can, and what it cannot.

The answers are gloo's. What NCCL or CUDA alone can is refused in gloo's words, with the name of the backend that was
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdpcheck.compat import groups_private
from fsdpcheck.execution.recording import RecordingGroup

_Gloo: Any = c10d.ProcessGroupGloo

_REFUSED: Final = {
    "allocate_tensor": "allocateTensor",
    "memory_stats": "getMemoryStats",
    "resume": "resume",
    "shrink": "shrink",
    "suspend": "suspend",
}
"""By method, what gloo calls it in its refusal. Tried: 2.13.0."""


class BackendAnswers(RecordingGroup):
    """A group that is its own backend. Whether it splits is the one answer that is not gloo's: it does not."""

    supports_shrinking = supports_splitting = supports_time_estimate = use_pg_for_symm_mem_rendezvous = False
    Options, _Options, Device = c10d.Backend.Options, _Gloo._Options, _Gloo.Device
    create_default_device, create_device = _Gloo.create_default_device, _Gloo.create_device

    def name(self) -> str:
        """What torch's own groups say; their C++ goes by ``getBackendName``, and takes a "gloo" for its own class."""
        return groups_private.backend_on_cpu(self)

    _get_backend_name = name

    @property
    def supports_coalescing(self) -> bool:
        """As ``_start_coalescing`` does."""
        return self._is_like_nccl()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether buffers of messages come from the backend, as ``fully_shard`` asks; they do not."""
        return False

    @property
    def mem_allocator(self) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(f"Backend {self.name()} does not support getMemAllocator")

    @property
    def options(self) -> Any:
        """Options of gloo, with the group's name and ranks; none for the group of all, as torch says."""
        found = _Gloo._Options()
        found.group_name = self.group_name
        found.global_ranks_in_group = [] if cast(Any, self) is dist.group.WORLD else list(self.identity[1])
        return found

    def get_group_store(self) -> Any:
        """The store by which torch has made the group."""
        return groups_private.store_of_group(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Members are connected from the first."""

    def setUsePgForSymmMemRendezvous(self, use: bool) -> None:
        """There is no symmetric memory without a GPU."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Nothing here takes time."""

    def _wait_for_pending_works(self) -> None:
        """Raises RuntimeError, as gloo."""
        raise RuntimeError(f"Only ProcessGroupNCCL supports waitForPendingWorks, but got {self.name()} backend.")

    def _register_on_completion_hook(self, hook: Callable[[Any], object]) -> None:
        """Raises RuntimeError, as gloo."""
        raise RuntimeError(f"Only ProcessGroupNCCL supports onCompletion hook, but got {self.name()} backend.")

    def _register_backend(self, *args: Any, **options: Any) -> None:
        """Raises NotSupported: the ranks would not meet in it."""
        raise self._not_offered("_register_backend")


def _refusing(called: str) -> Callable[..., Any]:
    def method(self: BackendAnswers, *args: Any, **options: Any) -> Any:
        raise RuntimeError(f"Backend {self.name()} does not support {called}")

    return method


for _name, _called in _REFUSED.items():
    setattr(BackendAnswers, _name, _refusing(_called))
