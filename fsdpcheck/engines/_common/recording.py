"""A process group that writes down every call as a Collective, then lets its subclass perform it.

Both engines use it: simulated ranks perform a call by meeting in memory, gloo ranks by calling gloo. Method names
differ between torch releases (2.13 calls ``all_gather_single`` what 2.11 calls ``_allgather_base``); all are here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from fsdpcheck.compat import torch_private
from fsdpcheck.engines._common.call_sites import subject
from fsdpcheck.engines._common.tensor_rules import require_contiguous, require_dense, require_multiple, require_pieces
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution.trace import Collective

OFFERED = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather"),
    *("reduce_scatter", "gather", "scatter", "all_to_all"),
)
"""Canonical names of the collectives that work; every other method of a group raises NotSupported."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]


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
            self._identity = torch_private.group_identity(self)
        return self._identity

    def size(self) -> int:
        return self._group_size

    def getBackendName(self) -> str:
        return torch_private.BACKEND

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
        return self._go(
            "all_reduce", tensors, tensors, opts, lambda g: g.allreduce(tensors, opts), reduce_op=_reduce_name(opts)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        native = _pairwise(tensors, tensors, lambda g, tensor, _: g.allreduce([tensor], options))
        return self._go("all_reduce", tensors, tensors, opts, native, reduce_op=_reduce_name(opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        native = lambda g: g.reduce(tensors, opts)  # noqa: E731
        return self._go(
            "reduce", tensors, tensors, opts, native, reduce_op=_reduce_name(opts), root=self._global(opts.rootRank)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        native = lambda g: g.broadcast(tensors, opts)  # noqa: E731
        return self._go("broadcast", tensors, tensors, opts, native, root=self._global(opts.rootRank))

    def barrier(self, opts: Any = None) -> Any:
        return self._go("barrier", [], [], opts, lambda g: g.barrier(opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        self._require_pieces("all_gather", outputs, inputs)
        flat = [tensor for row in outputs for tensor in row]
        return self._go("all_gather", inputs, flat, opts, lambda g: g.allgather(outputs, inputs, opts))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """``outputs[rank][tensor]``: the transpose of ``allgather``."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        options = opts if opts is not None else c10d.AllgatherOptions()
        native = _pairwise(outputs, inputs, lambda g, output, input: g._allgather_base(output, input, options))
        packed = self._packed("all_gather", outputs, inputs)
        signed = _signature(inputs), self._packed_signature(packed)
        return self._go("all_gather", inputs, packed, opts, native, signatures=signed, packed=True)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        self._require_pieces("reduce_scatter", inputs, outputs)
        flat = [tensor for row in inputs for tensor in row]
        native = lambda g: g.reduce_scatter(outputs, inputs, opts)  # noqa: E731
        return self._go("reduce_scatter", flat, outputs, opts, native, reduce_op=_reduce_name(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        options = opts if opts is not None else dist.ReduceScatterOptions()
        native = _pairwise(outputs, inputs, lambda g, output, input: g._reduce_scatter_base(output, input, options))
        packed = self._packed("reduce_scatter", inputs, outputs)
        signed = self._packed_signature(packed), _signature(outputs)
        reduce_op = _reduce_name(opts)
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
        return self._go("gather", inputs, flat, opts, native, root=root, signatures=(_signature(inputs), ()))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        self._require_pieces("scatter", inputs, outputs)
        flat = [tensor for row in inputs for tensor in row]
        native = lambda g: g.scatter(outputs, inputs, opts)  # noqa: E731
        root = self._global(opts.rootRank)
        return self._go("scatter", flat, outputs, opts, native, root=root, signatures=((), _signature(outputs)))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
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
        raise self._not_offered("send")

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        raise self._not_offered("recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        raise self._not_offered("recv from any source")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        raise self._not_offered("monitored_barrier")

    def _start_coalescing(self, *args: Any) -> None:
        raise self._not_offered("coalescing manager around list collectives")

    def _end_coalescing(self, *args: Any) -> Any:
        raise self._not_offered("coalescing manager around list collectives")

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise self._not_offered("split_group")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        raise self._not_offered("merge_remote_group")

    # -- how a call becomes a record -----------------------------------------------------------------------------

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
        require_dense(op, inputs)
        if outputs is not inputs:
            require_dense(op, outputs)
        name, ranks = self._identity or self.identity
        if signatures is None:
            read = _signature(inputs)
            written = read if outputs is inputs else _signature(outputs)
        else:
            read, written = signatures
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
            subject(sys._getframe(2)),
        )
        return self._perform(Call(collective, inputs, outputs, native, packed))

    def _sequence(self) -> int:
        """0-based number of the next call of this rank on this group."""
        self._calls += 1
        return self._calls - 1

    def _require_pieces(self, op: str, rows: Sequence[Sequence[Tensor]], owns: Sequence[Tensor]) -> None:
        """Raises RuntimeError unless each row has a tensor a rank, like the single tensor beside it."""
        for row, own in zip(rows, owns, strict=False):  # a rank that is not the root has no rows
            require_pieces(op, row, own, self._group_size)

    def _packed(self, op: str, larges: Sequence[Tensor], smalls: Sequence[Tensor]) -> list[Tensor]:
        """``larges`` as flat views of W parts, each as large as its small. Raises RuntimeError if sizes differ."""
        for large, small in zip(larges, smalls, strict=True):
            require_multiple(op, large, small, self._group_size)
        return [large.view(-1) for large in larges]

    def _packed_signature(self, packed: Sequence[Tensor]) -> Signature:
        """The signature of the parts, as if each was a tensor."""
        size = self._group_size
        parts = [(_NAMES.get(flat.dtype) or _name(flat.dtype), (flat.numel() // size,)) for flat in packed]
        return tuple(part for part in parts for _ in range(size))

    def _global(self, group_rank: int) -> int:
        return self.identity[1][group_rank]

    def _not_offered(self, what: str) -> NotSupported:
        return NotSupported(
            f"{what} is not offered in a checked program yet, on simulated ranks as on real ones\n"
            f"  got     {what} on group {self.identity[0]!r} of ranks {list(self.identity[1])}\n"
            f"  wanted  one of {', '.join(OFFERED)}\n"
            f"  next    express it by these calls, or leave the laws out that come to it; no engine offers it"
        )


def _pieces(tensor: Tensor, splits: list[int], size: int) -> list[Tensor]:
    return list(torch.split(tensor, splits) if splits else torch.chunk(tensor, size))


_NAMES: dict[torch.dtype, str] = {}


def _signature(tensors: Sequence[Tensor]) -> Signature:
    return tuple((_NAMES.get(t.dtype) or _name(t.dtype), tuple(t.shape)) for t in tensors)


def _name(dtype: torch.dtype) -> str:
    return _NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))


_REDUCE_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_REDUCE = {int(getattr(dist.ReduceOp, name)): name.lower() for name in _REDUCE_NAMES}
"""By number: torch makes a new object of an operation each time, and hashing one costs more than the rest."""


def _reduce_name(opts: Any) -> str:
    if opts is None:
        return "sum"
    op = getattr(opts.reduceOp, "op", opts.reduceOp)
    return _REDUCE.get(int(op)) or str(op)


def _pairwise(
    outputs: list[Tensor], inputs: list[Tensor], call: Callable[[Any, Tensor, Tensor], Any]
) -> Callable[[Any], Any]:
    return lambda group: _last([call(group, *pair) for pair in zip(outputs, inputs, strict=True)])


def _last(works: list[Any]) -> Any:
    """Wait for all but the last of several works of one call, and stand for them by the last."""
    for work in works[:-1]:
        work.wait()
    return works[-1]
