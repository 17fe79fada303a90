"""Buffers of a call that is under way: poisoned where they will be written, compared where they must not be."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.recording import Call
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.watch import Watch


class Flight:
    """Guards the buffers of one asynchronous call from issue to wait; gives the call private copies of its inputs.

    ``sends``: the rank is the root of a broadcast, whose own tensor is not written. Sparse tensors are not guarded.
    ``watch`` hears of them, if there is one. ``refilled``: the outputs hold other junk than usual.
    ``inputs_stay``: the inputs must not be freed either, as libraries do that know the stream on which they are read.
    """

    def __init__(self, call: Call, sends: bool, watch: Watch | None = None, *, refilled: bool = False) -> None:
        self._watch, self._refilled, self.inputs_stay = watch, refilled, False
        with torch.no_grad(), watch.resting() if watch is not None else nullcontext():
            copies = [(tensor, tensor.detach().clone()) for tensor in call.inputs]
            call.inputs = [copy for _, copy in copies]
            self._inputs = [(tensor, copy) for tensor, copy in copies if not tensor.is_sparse]
            self._outputs = [] if sends else [tensor for tensor in call.outputs if not tensor.is_sparse]
            for tensor in self._outputs:
                _poison_(tensor, refilled)
            if len(self._outputs) == 1:
                _salt_(self._outputs[0], refilled)
            # an input may share memory with an output (FSDP2 gathers in place): what it holds now is the baseline
            self._now = [tensor.detach().clone() for tensor, _ in self._inputs]
            self._salted = self._outputs[0].detach().clone() if len(self._outputs) == 1 else None
        self._tensors = [t for t in [*(tensor for tensor, _ in self._inputs), *self._outputs] if not t.is_inference()]
        self._versions = self._read_versions()
        if watch is not None:
            watch.begin(self, call.collective, [tensor for tensor, _ in self._inputs], self._outputs)

    def end(self) -> str:
        """The rank has waited: what ``touched`` says, and nothing is guarded any more."""
        if self._watch is None:
            return self.touched()
        self._watch.end(self)
        with self._watch.resting():
            return self.touched()

    def touched(self) -> str:
        """What was done to a buffer since the call was issued; "" when nothing was.

        Values decide; of several outputs (a gather) only where a version counter says that something was written. A
        counter is shared by all views of a storage, so by itself it only decides for a tensor that is its storage.
        """
        with torch.no_grad():
            for (tensor, _), before in zip(self._inputs, self._now, strict=True):
                if not is_there(tensor):
                    if self.inputs_stay:
                        return f"freed an input of shape {list(tensor.shape)}"
                elif not _same_bits(tensor, before):
                    return f"wrote to an input of shape {list(tensor.shape)}"
            for tensor in self._outputs:
                if not is_there(tensor):
                    return f"freed an output of shape {list(tensor.shape)}"
            if self._salted is not None and not _same_bits(self._outputs[0], self._salted):
                return f"wrote to an output of shape {list(self._outputs[0].shape)}"
            return self._counted()

    def _counted(self) -> str:
        """Which buffer was written by the version counters."""
        changed = [now != then for now, then in zip(self._read_versions(), self._versions, strict=True)]
        if not any(changed):
            return ""
        for tensor, written in zip(self._tensors, changed, strict=True):
            if written and _is_whole_storage(tensor):
                return f"wrote to a buffer of shape {list(tensor.shape)}"
        for tensor in self._outputs:
            if self._salted is None and not bool(_is_poison(tensor, self._refilled).all()):
                return f"wrote to an output of shape {list(tensor.shape)}"
        return ""

    def _read_versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _is_whole_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _poison_(tensor: Tensor, refilled: bool) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("inf" if refilled else "nan"))
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(_integer(tensor, refilled))


def _integer(tensor: Tensor, refilled: bool) -> int:
    known = torch.iinfo(tensor.dtype)
    return known.min if refilled else known.max


def _salt_(tensor: Tensor, refilled: bool) -> None:
    """Every second element of the poison becomes a number: arithmetic on NaN gives NaN, and would stay unseen.

    Refilled, those in between do."""
    if tensor.is_floating_point() and tensor.is_contiguous():
        tensor.data.view(-1)[refilled::2] = torch.finfo(tensor.dtype).min / 4


def is_there(tensor: Tensor) -> bool:
    """Whether the memory has not been freed meanwhile, as sharded implementations do with what they have sent."""
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()


def _is_poison(tensor: Tensor, refilled: bool) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isinf() if refilled else tensor.isnan()
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    return tensor == _integer(tensor, refilled)


_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compared as integers where that can be done, in one pass: NaN, which poison is, equals no NaN."""
    words = _WORDS.get(one.element_size())
    if one.is_floating_point() and words is not None and one.is_contiguous() and other.is_contiguous():
        return torch.equal(one.data.view(words), other.data.view(words))
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def written_in_flight(collective: Collective, rank: int, touched: str) -> Failure:
    text = (
        f"rank {rank} {touched} of a call before waiting for it\n  call    {collective}\n"
        f"  issued  at {collective.where or 'an unknown place'}\n"
        f"  next    wait for the work before its buffers are reused"
    )
    return Failure("in-flight", text, (RankState(rank, "running", "", collective.where),))
