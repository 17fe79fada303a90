"""Ranks that touch the buffers of a call while it is under way: seen at the operation that does it.

While a rank has calls that it has not waited for, a dispatch mode under all others sees each operation of that thread,
and compares the memory it reads and writes with the buffers of those calls: their outputs must be neither read nor
written, their inputs must not be written. What does not go through torch's dispatcher is not seen: ``numpy()``,
``tolist()``, kernels that torch.compile made. It meets the poison of simulation/in_flight.py all the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsdpcheck.compat import dispatch_private
from fsdpcheck.compat.observers_private import Unnoticed
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.scheduler import place


@dataclass(frozen=True)
class _Buffer:
    """A tensor of a call under way, as the bytes it occupies in its storage."""

    shape: tuple[int, ...]
    storage: int
    first: int
    last: int
    written: bool
    call: Collective

    def meets(self, tensor: Tensor) -> bool:
        """Whether the tensor has bytes in common with it; tensors with gaps have none that are known."""
        if not tensor.is_contiguous() or tensor.untyped_storage()._cdata != self.storage:
            return False
        first = tensor.storage_offset() * tensor.element_size()
        return first < self.last and self.first < first + tensor.numel() * tensor.element_size()


class Watch(Unnoticed):  # type: ignore[no-untyped-call]
    """What one rank does between the issue of its calls and their waits; ``refuse`` is given what it must not."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So torch.compile does not take it for a mode of the program."""
        return True

    def __init__(self, rank: int, refuse: Callable[[Failure], object], memory: Memory | None = None) -> None:
        """``memory``: that of a GPU, which is told of each operation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self._refuse, self._memory = rank, refuse, memory
        self._buffers: dict[object, list[_Buffer]] = {}
        self._storages: set[int] = set()
        self._rests = False
        self._within: set[int] = set()
        """Threads that are in an operation under it: torch has taken it off their modes, and puts it back after it."""

    def begin(self, key: object, call: Collective, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """From now on the call is under way; ``key`` ends it. ``read``, ``written``: by the call."""
        buffers = [_buffer(tensor, False, call) for tensor in read] + [
            _buffer(tensor, True, call) for tensor in written
        ]
        self._buffers[key] = [buffer for buffer in buffers if buffer is not None]
        self._look_at_what_is_there()

    def end(self, key: object) -> None:
        """The call has been waited for."""
        del self._buffers[key]
        self._look_at_what_is_there()

    def _look_at_what_is_there(self) -> None:
        self._storages = {buffer.storage for buffers in self._buffers.values() for buffer in buffers}
        self.take_its_place()

    def take_its_place(self) -> None:
        """On this thread, if it is needed: torch puts modes back as they were when a backward has ended."""
        wanted = bool(self._storages) or self._memory is not None
        dispatch_private.keep_under_all_modes(self, wanted and threading.get_ident() not in self._within)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """While open, the rank's program runs."""
        self.take_its_place()
        try:
            yield
        finally:
            dispatch_private.keep_under_all_modes(self, False)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While open, what is computed is none of the rank's doing."""
        before, self._rests = self._rests, True
        try:
            yield
        finally:
            self._rests = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and dispatch_private.is_unwrapped(types):
            return NotImplemented  # comes back as operations of what the tensors wrap
        options = kwargs or {}
        if self._rests:
            return func(*args, **options)
        if self._storages:
            for tensor, writes in dispatch_private.accesses(func, args, options):
                if _has_storage(tensor) and tensor.untyped_storage()._cdata in self._storages:
                    self._compare(func, tensor, writes)
        memory = self._memory
        looks = memory is not None and not memory.quiet and memory.before(func, args, options)
        self._within.add(thread := threading.get_ident())
        try:
            results = func(*args, **options)
        finally:
            self._within.discard(thread)
        if looks and memory is not None:
            memory.after(func, results)
        return results

    def _compare(self, func: Any, tensor: Tensor, writes: bool) -> None:
        for buffers in self._buffers.values():
            for buffer in buffers:
                if (writes or buffer.written) and buffer.meets(tensor):
                    self._refuse(self._failure(buffer, "wrote to" if writes else "read", str(func)))

    def _failure(self, buffer: _Buffer, did: str, operation: str) -> Failure:
        where, stack = place(sys._getframe(3))
        what = f"{'an output' if buffer.written else 'an input'} of shape {list(buffer.shape)}"
        text = (
            f"rank {self._rank} {did} {what} of a call before waiting for it\n  call    {buffer.call}\n"
            f"  issued  at {buffer.call.where or 'an unknown place'}\n  by      {operation}, at {where}\n"
            f"  next    wait for the work first"
        )
        return Failure("in-flight", text, (RankState(self._rank, "running", "", where, stack),))


def _buffer(tensor: Tensor, written: bool, call: Collective) -> _Buffer | None:
    if not _has_storage(tensor) or not tensor.is_contiguous() or not tensor.numel():
        return None
    first = int(tensor.storage_offset()) * tensor.element_size()
    last = first + tensor.numel() * tensor.element_size()
    return _Buffer(tuple(tensor.shape), tensor.untyped_storage()._cdata, first, last, written, call)


def _has_storage(tensor: Tensor) -> bool:
    return not tensor.is_sparse and tensor.device.type != "meta"
