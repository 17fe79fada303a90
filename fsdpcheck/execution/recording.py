"""A process group that writes down every call as a Collective, then lets its subclass perform it.

Both engines use it: simulated ranks perform a call by meeting in memory, gloo ranks by calling gloo. Method names
differ between torch releases (2.13 calls ``all_gather_single`` what 2.11 calls ``_allgather_base``); all are here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from fsdpcheck.compat import frames_private, groups_private
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution.call_sites import caller_of, subject_and_line
from fsdpcheck.execution.matching import ANY_SOURCE
from fsdpcheck.execution.signatures import (
    Signature,
    packed_signature,
    reduce_factor,
    reduce_name,
    signature,
    sparse_signature,
)
from fsdpcheck.execution.tensor_rules import (
    require_a_rank,
    require_contiguous,
    require_dense,
    require_member,
    require_multiple,
    require_one,
    require_pieces,
)
from fsdpcheck.execution.trace import Collective

OFFERED = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather"),
    *("reduce_scatter", "gather", "scatter", "all_to_all", "send", "recv", "monitored_barrier"),
)
"""Canonical names of the calls that work; every other method of a group raises NotSupported."""


@dataclass(slots=True)
class Call:
    """One live call: what is recorded of it, its tensors, and how a real process group would do it.

    ``inputs`` and ``outputs`` are flat lists; all_gather has W outputs an input, reduce_scatter W inputs an output.
    ``packed``: the single-tensor forms of these two, where the W lie one behind the other in one flat tensor.
    """

    collective: Collective
    inputs: list[Tensor]
    outputs: list[Tensor]
    native: Callable[[Any], Any]
    packed: bool = False
    factor: float | None = None
    """What each input is multiplied by before it is summed (PREMUL_SUM)."""
    times: list[int] = field(default_factory=list)
    """See trace.Times."""
    queued: Any = None
    """Of ranks that share a GPU: what the rank had queued there when it issued the call (simulation/streams.py)."""


if TYPE_CHECKING:

    class _Group:
        """ProcessGroup as its Python trampolines call it; its stub has overloads that no subclass can have."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    _Group = dist.ProcessGroup


class RecordingGroup(_Group):
    """Turns each method of a process group into one ``_perform(call)``. Subclasses say how, and where records go."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group_rank, self._group_size = rank, size
        self._calls = 0
        self._messages: dict[tuple[object, ...], int] = {}
        self._coalesced: list[Any] | None = None
        self._identity: tuple[str, tuple[int, ...]] | None = None
        self._name = ""

    def _perform(self, call: Call) -> Any:
        raise NotImplementedError

    # -- who we are ----------------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """How many calls this rank has made on this group."""
        return self._calls

    @property
    def identity(self) -> tuple[str, tuple[int, ...]]:
        """Name and global ranks by rank in the group: what keys a group (store prefixes are not unique per rank)."""
        if self._identity is None:
            self._identity = groups_private.group_identity(self)
        return self._identity

    def stand_for(self, name: str, ranks: tuple[int, ...]) -> None:
        """Be known by this name, for a group that torch.distributed does not know."""
        self._identity = name, ranks

    def size(self) -> int:
        return self._group_size

    def getBackendName(self) -> str:
        return groups_private.BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        """Asked for by torch.distributed.checkpoint, of a group's backends."""
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        """torch gives a group its name, and asks for it again when it has forgotten a destroyed group."""
        self._name = name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self.pg_name

    # -- the calls -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        require_one("all_reduce", tensors)
        native = lambda g: g.allreduce(tensors, opts)  # noqa: E731
        signed = sparse_signature(tensors) if any(tensor.is_sparse for tensor in tensors) else signature(tensors)
        return self._go(
            "all_reduce", tensors, tensors, opts, native, reduce_op=reduce_name(opts), signatures=(signed, signed)
        )

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        native = _pairwise(tensors, tensors, lambda g, tensor, _: g.allreduce([tensor], options))
        return self._go("all_reduce", tensors, tensors, opts, native, reduce_op=reduce_name(opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        require_one("reduce", tensors)
        native = lambda g: g.reduce(tensors, opts)  # noqa: E731
        return self._go(
            "reduce", tensors, tensors, opts, native, reduce_op=reduce_name(opts), root=self._global(opts.rootRank)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        require_one("broadcast", tensors)
        native = lambda g: g.broadcast(tensors, opts)  # noqa: E731
        return self._go("broadcast", tensors, tensors, opts, native, root=self._global(opts.rootRank))

    def barrier(self, opts: Any = None) -> Any:
        return self._go("barrier", [], [], opts, lambda g: g.barrier(opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Pieces may differ in shape on NCCL, if each is its rank's; gloo refuses that."""
        self._require_pieces("all_gather", outputs, inputs, uneven=self._is_like_nccl())
        flat = [tensor for row in outputs for tensor in row]
        native = lambda g: g.allgather(outputs, inputs, opts)  # noqa: E731
        signed = signature(inputs) if _is_even(outputs) else (), signature(flat)
        return self._go("all_gather", inputs, flat, opts, native, signatures=signed)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """``outputs[rank][tensor]``: the transpose of ``allgather``."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        options = opts if opts is not None else c10d.AllgatherOptions()
        native = _pairwise(outputs, inputs, lambda g, output, input: g._allgather_base(output, input, options))
        packed = self._packed("all_gather", outputs, inputs)
        signed = signature(inputs), packed_signature(packed, self._group_size)
        return self._go("all_gather", inputs, packed, opts, native, signatures=signed, packed=True)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Pieces may differ in shape, if each is that of its rank's output."""
        self._require_pieces("reduce_scatter", inputs, outputs, uneven=True)
        flat = [tensor for row in inputs for tensor in row]
        native = lambda g: g.reduce_scatter(outputs, inputs, opts)  # noqa: E731
        signed = signature(flat), signature(outputs) if _is_even(inputs) else ()
        return self._go("reduce_scatter", flat, outputs, opts, native, reduce_op=reduce_name(opts), signatures=signed)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        options = opts if opts is not None else dist.ReduceScatterOptions()
        native = _pairwise(outputs, inputs, lambda g, output, input: g._reduce_scatter_base(output, input, options))
        packed = self._packed("reduce_scatter", inputs, outputs)
        signed = packed_signature(packed, self._group_size), signature(outputs)
        reduce_op = reduce_name(opts)
        return self._go(
            "reduce_scatter", packed, outputs, opts, native, reduce_op=reduce_op, signatures=signed, packed=True
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        self._require_pieces("gather", outputs, inputs)
        flat = [tensor for row in outputs for tensor in row]
        native = lambda g: g.gather(outputs, inputs, opts)  # noqa: E731
        root = self._global(opts.rootRank)
        return self._go("gather", inputs, flat, opts, native, root=root, signatures=(signature(inputs), ()))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        self._require_pieces("scatter", inputs, outputs)
        flat = [tensor for row in inputs for tensor in row]
        native = lambda g: g.scatter(outputs, inputs, opts)  # noqa: E731
        root = self._global(opts.rootRank)
        return self._go("scatter", flat, outputs, opts, native, root=root, signatures=((), signature(outputs)))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        require_a_rank("all_to_all", self._group_size, outputs, inputs)
        native = lambda g: g.alltoall(outputs, inputs, opts)  # noqa: E731
        return self._go("all_to_all", inputs, outputs, opts, native, signatures=((), ()))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        size = self._group_size
        require_contiguous("all_to_all", output, input)
        outputs = _pieces(output, output_splits, size)
        inputs = _pieces(input, input_splits, size)
        native = lambda g: g.alltoall_base(output, input, output_splits, input_splits, opts)  # noqa: E731
        return self._go("all_to_all", inputs, outputs, opts, native, signatures=((), ()))

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        way = self._global(self._group_rank), self._global(dst)
        return self._message("send", tensors, way, tag, lambda g: g.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        way = self._global(src), self._global(self._group_rank)
        return self._message("recv", tensors, way, tag, lambda g: g.recv(tensors, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._message(ANY_SOURCE, tensors, self.identity[1], tag, lambda g: g.recv_anysource(tensors, tag))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier: who does not come is named by the report of the hang, and no time-out is needed for it."""
        self._go("monitored_barrier", [], [], None, lambda g: g.barrier(None)).wait()

    def _start_coalescing(self, *args: Any) -> None:
        if not self._is_like_nccl():
            raise RuntimeError("Backend gloo does not implement startCoalescing")
        self._coalesced = []

    def _end_coalescing(self, *args: Any) -> Together:
        """One work for all calls since the start; each was issued when it was made."""
        if self._coalesced is None:
            raise RuntimeError("Backend gloo does not implement endCoalescing")
        works, self._coalesced = self._coalesced, None
        return Together(works)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise self._not_offered("split_group")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        raise self._not_offered("merge_remote_group")

    # -- how a call becomes a record -----------------------------------------------------------------------------

    def _message(
        self, op: str, tensors: list[Tensor], way: tuple[int, ...], tag: int, native: Callable[[Any], Any]
    ) -> Any:
        """Record one side of a message, then perform it. ``way``: source and destination, or all possible sources.

        Raises RuntimeError for what gloo refuses: a message to oneself, a tensor that is not contiguous."""
        require_contiguous(op, *tensors)
        if tag < 0:
            raise RuntimeError("Tag must be nonnegative")
        if op != ANY_SOURCE and way[0] == way[1]:
            raise RuntimeError(f"{op}: rank {way[0]} cannot send itself a message")
        sends, signed = op == "send", signature(tensors)
        frame = sys._getframe(2)
        whose, line = subject_and_line(frame)
        collective = Collective(
            op,
            way,
            self.identity[0],
            self.count_message(op, way, tag),
            inputs=signed if sends else (),
            outputs=() if sends else signed,
            asynchronous=not frames_private.is_called_to_wait(sys._getframe(1)),
            subject=whose,
            tag=tag,
            where=line,
            called_at=caller_of(frame),
        )
        return self._performed(Call(collective, tensors if sends else [], [] if sends else tensors, native))

    def count_message(self, op: str, way: tuple[int, ...], tag: int | None) -> int:
        """0-based number of the next message that this rank sends, or receives, on one way under one tag."""
        row = op, way, tag
        self._messages[row] = self._messages.get(row, -1) + 1
        return self._messages[row]

    def _go(
        self,
        op: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        opts: Any,
        native: Callable[[Any], Any],
        *,
        reduce_op: str = "",
        root: int = -1,
        signatures: tuple[Signature, Signature] | None = None,
        packed: bool = False,
    ) -> Any:
        """Record the call, then perform it. ``signatures``: what all members must agree on; None for all tensors."""
        factor = reduce_factor(opts) if reduce_op else None
        if factor is not None and not self._is_like_nccl():
            raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with gloo: it is NCCL's")
        require_dense(op, inputs)
        if outputs is not inputs:
            require_dense(op, outputs)
        name, ranks = self._identity or self.identity
        if signatures is None:
            read = signature(inputs)
            written = read if outputs is inputs else signature(outputs)
        else:
            read, written = signatures
        frame = sys._getframe(2)
        whose, line = subject_and_line(frame)
        collective = Collective(
            op,
            ranks,
            name,
            self._sequence(),
            reduce_op,
            root,
            read,
            written,
            bool(getattr(opts, "asyncOp", False)),
            whose,
            where=line,
            called_at=caller_of(frame),
        )
        return self._performed(Call(collective, inputs, outputs, native, packed, factor))

    def _performed(self, call: Call) -> Any:
        work = self._perform(call)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _sequence(self) -> int:
        """0-based number of the next call of this rank on this group."""
        self._calls += 1
        return self._calls - 1

    def _require_pieces(
        self, op: str, rows: Sequence[Sequence[Tensor]], owns: Sequence[Tensor], uneven: bool = False
    ) -> None:
        """Raises RuntimeError unless each row has a tensor a rank, like the single tensor beside it.

        ``uneven``: only this rank's need be like it."""
        for row, own in zip(rows, owns, strict=False):  # a rank that is not the root has no rows
            require_pieces(op, row, own, self._group_size, self._group_rank if uneven else None)

    def _is_like_nccl(self) -> bool:
        """Whether the program asked for NCCL, which takes calls that gloo refuses."""
        return False

    def _packed(self, op: str, larges: Sequence[Tensor], smalls: Sequence[Tensor]) -> list[Tensor]:
        """``larges`` as flat views of W parts, each as large as its small. Raises RuntimeError if sizes differ."""
        for large, small in zip(larges, smalls, strict=True):
            require_multiple(op, large, small, self._group_size)
        return [large.view(-1) for large in larges]

    def _global(self, group_rank: int) -> int:
        """Raises RuntimeError for what is no rank of the group."""
        ranks = self.identity[1]
        require_member(group_rank, len(ranks))
        return ranks[group_rank]

    def _not_offered(self, what: str) -> NotSupported:
        return NotSupported(
            f"{what} is not offered in a checked program yet, on simulated ranks as on real ones\n"
            f"  got     {what} on group {self.identity[0]!r} of ranks {list(self.identity[1])}\n"
            f"  wanted  one of {', '.join(OFFERED)}\n"
            f"  next    express it by these calls, or leave the laws out that come to it; no engine offers it"
        )


def _pieces(tensor: Tensor, splits: list[int], size: int) -> list[Tensor]:
    if splits and len(splits) != size:
        raise RuntimeError(f"Number of tensor splits not equal to group size: {len(splits)}, of {size} ranks")
    return list(torch.split(tensor, splits) if splits else torch.chunk(tensor, size))


class Together(c10d.Work):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        """Wait for each."""
        for work in self.works:
            work.wait()
        return True


def _is_even(rows: Sequence[Sequence[Tensor]]) -> bool:
    return all(piece.shape == row[0].shape for row in rows for piece in row)


def _pairwise(
    outputs: list[Tensor], inputs: list[Tensor], call: Callable[[Any, Tensor, Tensor], Any]
) -> Callable[[Any], Any]:
    return lambda group: _last([call(group, *pair) for pair in zip(outputs, inputs, strict=True)])


def _last(works: list[Any]) -> Any:
    """Wait for all but the last of several works of one call, and stand for them by the last."""
    for work in works[:-1]:
        work.wait()
    return works[-1]
