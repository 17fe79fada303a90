"""The memory of one rank's GPU: which tensors lie there, who uses them in which order, and who is given it next.

All tensors of a played GPU are on the CPU, so which are the GPU's is inferred: what is made or moved there by name,
what an operation computes of such a tensor, and what it computes with, for a GPU computes with nothing else (numbers,
integers and copies aside). A tensor that is not known to be there is not judged.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.compat import dispatch_private
from fsdpcheck.execution import Failure
from fsdpcheck.execution.call_sites import line_of
from fsdpcheck.simulation.device import wording
from fsdpcheck.simulation.device.allocator import Allocator, Block
from fsdpcheck.simulation.device.history import Access, History, Line, Span
from fsdpcheck.simulation.device.timelines import Timeline, Timelines

_BLOCKS: Final = frozenset(
    (
        *("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select"),
        *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
    )
)
"""Operations whose result the host has to wait for."""
_MIXES: Final = frozenset(("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"))
"""Operations of tensors on a GPU and such on the host."""


class Memory:
    """What a rank does with it. ``refuse`` is given what breaks the order, and does not return."""

    def __init__(self, rank: int, timelines: Timelines, refuse: Callable[[Failure], object]) -> None:
        self._rank, self.timelines, self._refuse = rank, timelines, refuse
        self._blocks: dict[int, Block] = {}
        self._allocator = Allocator(rank, timelines, refuse)
        self.quiet = False
        """Whether what is computed now is none of the rank's doing."""

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """While open, it is not."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    # -- operations ------------------------------------------------------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Note what an operation reads and writes; whether the GPU does it, so that its results lie there.

        To be called from the dispatch mode, with what it is given.
        """
        op = dispatch_private.operation(func)
        name = op.name
        if not op.arguments:
            return name in dispatch_private.OF_SHAPES and self.is_on_gpu(args[0])
        if name == "copy_":
            return self._copy(args, kwargs)
        tensors = list(dispatch_private.accesses(func, args, kwargs))
        blocks = [self._blocks.get(_key(tensor)) for tensor, _ in tensors]
        if not any(blocks) and op.namespace != "fsdp":
            return False
        on_gpu = any(block is not None and block.place == "gpu" for block in blocks)
        if on_gpu and name not in _MIXES and _is_of_host(tensors, blocks):
            self.timelines.block(self.timelines.record(self.timelines.current))
            on_gpu = False
        line = line_of(sys._getframe(2))
        of_fsdp = op.namespace == "fsdp"
        if of_fsdp or (on_gpu and name not in _MIXES):
            on_gpu = True
            for tensor, _ in tensors:
                self._infer(tensor, of_fsdp, line)
        if not on_gpu:
            self._on_host(tensors, op.text)
            return False
        stream = self.timelines.launch(self.timelines.current)
        if not stream.in_graph and torch.is_grad_enabled():
            stream.in_graph = any(tensor.requires_grad for tensor, _ in tensors)
        for (tensor, writes), block in zip(tensors, blocks, strict=True):
            self._note(tensor, stream, writes, op.text, line, block)
        if name in _BLOCKS or (name == "index" and _is_masked(args)):
            self.timelines.block(stream.moment())
        return True

    def after(self, func: Any, results: Any) -> None:
        """Note the results of an operation that the GPU has done: new memory, allocated on the current stream."""
        op = dispatch_private.operation(func)
        if op.namespace in dispatch_private.COMMUNICATION:
            return
        line: Line = None
        for result in results if isinstance(results, list | tuple) else (results,):
            if isinstance(result, Tensor) and _key(result) not in self._blocks:
                line = line or line_of(sys._getframe(2))
                self._allocate(result, "gpu", line)
                if op.name not in dispatch_private.WITHOUT_VALUES:
                    self._note(result, self.timelines.current, True, op.text, line)

    def _copy(self, args: Any, kwargs: Any) -> bool:
        """``copy_``, which may be from the host or to it."""
        target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return self.copied(target, source, non_blocking, line_of(sys._getframe(3)))

    def copied(self, target: Tensor, source: Tensor, non_blocking: bool, line: Line) -> bool:
        """Note a copy; whether the GPU has a part in it.

        The host waits for one from it or to it, unless that is non-blocking and does not end in memory that is paged.
        """
        of_target, of_source = self._blocks.get(_key(target)), self._blocks.get(_key(source))
        places = [block.place if block is not None else "host" for block in (of_target, of_source)]
        if "gpu" not in places:
            self._on_host([(source, False), (target, True)], "copy_")
            return False
        stream = self.timelines.launch(self.timelines.current)
        if places[0] == "":
            self._infer(target, True, line)
        for tensor, writes, place in ((source, False, places[1]), (target, True, places[0])):
            if place != "host":
                self._note(tensor, stream, writes, "copy_", line)
        crosses = any(place in ("host", "pinned") for place in places)
        if crosses and not (non_blocking and places[0] != "host"):
            self.timelines.block(stream.moment())
        return True

    def _on_host(self, tensors: Iterable[tuple[Tensor, bool]], operation: str) -> None:
        """The host reads and writes its own memory, of which only what copies use is known."""
        for tensor, writes in tensors:
            block = self._blocks.get(_key(tensor))
            if block is not None and block.place == "pinned":
                self._note(tensor, self.timelines.host, writes, operation, line_of(sys._getframe(3)))
                self.timelines.host.time += 1

    def read_by_host(self, tensor: Tensor, operation: str, frame: FrameType) -> None:
        """The host reads values past the dispatcher, as ``tolist`` and ``numpy`` do; of a GPU's it waits for them."""
        block = self._blocks.get(_key(tensor))
        if block is None or not block.place:
            return
        on_gpu = block.place == "gpu"
        reader = self.timelines.launch(self.timelines.current) if on_gpu else self.timelines.host
        self._note(tensor, reader, False, operation, line_of(frame))
        if on_gpu:
            self.timelines.block(reader.moment())
        else:
            self.timelines.host.time += 1

    def _note(
        self,
        tensor: Tensor,
        timeline: Timeline,
        writes: bool,
        operation: str,
        line: Line,
        block: Block | None = None,
    ) -> None:
        block = block or self._blocks.get(_key(tensor))
        if block is None or not tensor.numel():
            return
        new = Access(timeline, timeline.time, _span(tensor), writes, operation, line)
        old = block.history.add(new)
        if old is not None:
            self._refuse(wording.race(self._rank, tuple(tensor.shape), new, old))

    # -- calls of process groups -------------------------------------------------------------------------------------

    def used_by_call(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], timeline: Timeline, name: str) -> None:
        """A call of a process group reads and writes there; what NCCL is given lies on the GPU."""
        line = line_of(sys._getframe(2))
        for tensor, writes in (*((tensor, False) for tensor in inputs), *((tensor, True) for tensor in outputs)):
            if not tensor.is_sparse:
                self._infer(tensor, True, line)
                self._note(tensor, timeline, writes, name, line)

    # -- what lies where -----------------------------------------------------------------------------------------------

    def is_on_gpu(self, tensor: Any) -> bool:
        block = self._blocks.get(_key(tensor)) if isinstance(tensor, Tensor) else None
        return block is not None and block.place == "gpu"

    def made(self, tensor: Tensor, place: str, operation: str, frame: FrameType) -> None:
        """A tensor was made, or moved, by name: to the "gpu", to "pinned" memory, to the "host", or "", to wherever
        torch meant. ``operation``: what wrote values there, "" for nothing."""
        if not _has_memory(tensor):
            return
        line, block = line_of(frame), self._blocks.get(_key(tensor))
        if place == "host":
            self._blocks.pop(_key(tensor), None)
        elif block is None:
            self._allocate(tensor, place, line)
        else:
            block.place = place or block.place
        if operation and place == "gpu":
            self._note(tensor, self.timelines.launch(self.timelines.current), True, operation, line)

    def _infer(self, tensor: Tensor, surely: bool, line: Line) -> None:
        """A GPU computes with it. ``surely``: whatever it is; otherwise numbers and integers may be the host's."""
        block = self._blocks.get(_key(tensor))
        if block is not None:
            block.place = block.place or "gpu"
        elif _has_memory(tensor) and (surely or (tensor.dim() and tensor.is_floating_point())):
            self._allocate(tensor, "gpu", line, owned=surely)

    def _allocate(self, tensor: Tensor, place: str, line: Line, owned: bool = True) -> None:
        if not _has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks[key] = Block(place, self.timelines.current if owned else None, line)
        block.bytes = storage.nbytes()
        block.storage = weakref.ref(storage, lambda _: self._forget(key, block))
        if owned:
            self._allocator.reuse(block)

    # -- the caching allocator -----------------------------------------------------------------------------------------

    def recorded(self, tensor: Tensor, stream: Timeline) -> None:
        """``record_stream``: the memory is given to nobody before what the stream has by then has ended."""
        block = self._blocks.get(_key(tensor))
        if block is not None:
            block.recorded.add(stream)

    def resized(self, storage: Any, size: int, frame: FrameType) -> None:
        """A storage is about to be resized: to nothing, which frees its memory, or to something, which allocates."""
        block, before = self._blocks.get(storage._cdata), storage.nbytes()
        if block is None and size > before == 0:
            block = self._blocks[storage._cdata] = Block("")
            key, made = storage._cdata, block
            block.storage = weakref.ref(storage, lambda _: self._forget(key, made))
        if block is None or size == before:
            return
        if before:
            self._allocator.give_back(block, line_of(frame))
        block.history, block.recorded = History(), set()
        block.bytes, block.owner, block.allocated = size, self.timelines.current, line_of(frame)
        if size:
            self._allocator.reuse(block)

    def _forget(self, key: int, block: Block) -> None:
        """Nothing refers to the storage any more."""
        if self._blocks.get(key) is block:
            del self._blocks[key]
        self._allocator.give_back(block, line_of(sys._getframe(1)))


def _is_of_host(tensors: Iterable[tuple[Tensor, bool]], blocks: Iterable[Block | None]) -> bool:
    """Whether the host computes: with its own memory, and numbers that torch has it wait for."""
    places = {block.place for (tensor, _), block in zip(tensors, blocks, strict=True) if block and tensor.dim()}
    return "pinned" in places and "gpu" not in places


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_sparse and tensor.device.type == "cpu"


def _key(tensor: Tensor) -> int:
    """By which its storage is known; 0 for a tensor that has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse one
        return 0


def _span(tensor: Tensor) -> Span:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return Span(first, first + int(tensor.numel()) * size)
    reach = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    layout = None if reach <= tensor.numel() else (tuple(tensor.shape), tensor.stride())
    return Span(first, first + reach * size, layout)


def _is_masked(args: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
