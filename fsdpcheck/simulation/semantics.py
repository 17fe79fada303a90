"""What each collective computes: from the inputs of all members to the outputs of each, in one fixed order of ranks.

Reductions add in rank order in the tensors' own dtype. AVG is the sum, then one division (what gloo does: fl(S/W)), or
"premultiply": the sum of what each member multiplied by fl(1/W) before, as NCCL's PREMUL_SUM does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsdpcheck.case import Averaging
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.recording import Call
from fsdpcheck.execution.tensor_rules import AS_MEMORY, as_memory

Results = list[list[Tensor]]
"""Per member, in group order: the values of its outputs ([] when it has none)."""


def move(calls: Sequence[Call], averaging: Averaging = "divide") -> Results:
    """The results of one complete, matching instance. ``calls`` in group order."""
    called = calls[0].collective
    if averaging == "premultiply" and called.reduce_op == "avg":
        calls = [_premultiplied(call, len(calls)) for call in calls]
    if calls[0].factor is not None:
        calls = [_multiplied(call, call.factor) for call in calls if call.factor is not None]
    if called.op in AS_MEMORY and not all(t.is_sparse or t.is_contiguous() for call in calls for t in call.inputs):
        calls = [replace(call, inputs=[as_memory(tensor) for tensor in call.inputs]) for call in calls]
    return _MOVES[called.op](calls)


def _premultiplied(call: Call, size: int) -> Call:
    """The call that sums what this one averages; its inputs are new tensors."""
    inputs = [tensor.detach() * (tensor.new_ones(()) / size) for tensor in call.inputs]
    return Call(replace(call.collective, reduce_op="sum"), inputs, call.outputs, call.native, call.packed)


def _multiplied(call: Call, factor: float) -> Call:
    """The call that sums what this one multiplies and sums."""
    inputs = [tensor.detach() * factor for tensor in call.inputs]
    return Call(replace(call.collective, reduce_op="sum"), inputs, call.outputs, call.native, call.packed)


def _all_reduce(calls: Sequence[Call]) -> Results:
    reduced = [_reduced([call.inputs[i] for call in calls], calls[0]) for i in range(len(calls[0].inputs))]
    return [reduced for _ in calls]


def _reduce(calls: Sequence[Call]) -> Results:
    """Only the root's tensor is defined afterwards (gloo leaves partial sums in the others), so the others hold NaN."""
    root, (total, *_) = _root(calls), _all_reduce(calls)
    undefined = [_undefined(tensor) for tensor in total]
    return [total if member == root else undefined for member in range(len(calls))]


def _broadcast(calls: Sequence[Call]) -> Results:
    root = _root(calls)
    sent = [_copy(tensor) for tensor in calls[root].inputs]
    return [[] if member == root else sent for member in range(len(calls))]


def _barrier(calls: Sequence[Call]) -> Results:
    return [[] for _ in calls]


def _all_gather(calls: Sequence[Call]) -> Results:
    """One new tensor of all members' parts an input, for those who asked for one, and its parts for the others."""
    sent = [[call.inputs[i].detach() for call in calls] for i in range(len(calls[0].inputs))]
    packed = [torch.cat([part.reshape(-1) for part in parts]) for parts in sent]
    if all(call.packed for call in calls):
        return [packed for _ in calls]
    loose = [part.clone() for parts in sent for part in parts]
    return [packed if call.packed else loose for call in calls]


def _reduce_scatter(calls: Sequence[Call]) -> Results:
    """Elementwise, so the parts may be reduced together: bits are the same as part by part."""
    size, count = len(calls), len(calls[0].outputs)
    if all(call.packed for call in calls):
        reduced = [_parts(_reduced([call.inputs[i] for call in calls], calls[0]), size) for i in range(count)]
        return [[parts[member] for parts in reduced] for member in range(size)]
    loose = [_loose(call, size) for call in calls]
    return [
        [_reduced([inputs[i * size + member] for inputs in loose], calls[0]) for i in range(count)]
        for member in range(size)
    ]


def _loose(call: Call, size: int) -> list[Tensor]:
    """A reduce_scatter's W inputs an output, each by itself."""
    return [part for flat in call.inputs for part in _parts(flat, size)] if call.packed else call.inputs


def _parts(flat: Tensor, size: int) -> Sequence[Tensor]:
    return flat.detach().view(size, flat.numel() // size).unbind(0)


def _gather(calls: Sequence[Call]) -> Results:
    root = _root(calls)
    gathered = [_copy(call.inputs[0]) for call in calls]
    return [gathered if member == root else [] for member in range(len(calls))]


def _scatter(calls: Sequence[Call]) -> Results:
    pieces = calls[_root(calls)].inputs
    return [[_copy(pieces[member])] for member in range(len(calls))]


def unequal_parts(members: Sequence[int], calls: Sequence[Call]) -> Failure | None:
    """The failure of an all_to_all in which some rank sends another one more, less or other than that one takes."""
    if any(call.collective.op != "all_to_all" for call in calls):
        return None
    lines = []
    for sender, sent in zip(members, calls, strict=True):
        for place, taker in enumerate(members):
            part, into = sent.inputs[place], calls[place].outputs[members.index(sender)]
            if (part.dtype, part.numel()) != (into.dtype, into.numel()):
                lines.append(
                    f"  rank {sender} sends {part.numel()} of {part.dtype} to rank {taker}, which takes {into.numel()} "
                    f"of {into.dtype}"
                )
    if not lines:
        return None
    sides = [f"  rank {rank}: {c.collective} at {c.collective.where}" for rank, c in zip(members, calls, strict=True)]
    head = f"mismatch: call #{calls[0].collective.sequence} on ranks {list(members)} differs in what is sent and taken"
    states = tuple(
        RankState(rank, "blocked", str(call.collective), call.collective.where)
        for rank, call in zip(members, calls, strict=True)
    )
    return Failure("mismatch", "\n".join([head, *lines, *sides]), states)


def _all_to_all(calls: Sequence[Call]) -> Results:
    return [[_copy(call.inputs[member]) for call in calls] for member in range(len(calls))]


_MOVES: dict[str, Callable[[Sequence[Call]], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "product": Tensor.mul_,
    "min": lambda total, term: torch.minimum(total, term, out=total),
    "max": lambda total, term: torch.maximum(total, term, out=total),
    "band": Tensor.bitwise_and_,
    "bor": Tensor.bitwise_or_,
    "bxor": Tensor.bitwise_xor_,
}


def _reduced(terms: Sequence[Tensor], call: Call) -> Tensor:
    name = call.collective.reduce_op
    combine = _COMBINE.get(name)
    if combine is None:
        raise NotSupported(
            f"simulated ranks cannot reduce with {name}\n  got     {call.collective}\n"
            f"  wanted  one of {', '.join(_COMBINE)}\n  next    use one of these, or run on real ranks"
        )
    total = terms[0].detach().clone()
    if total.is_sparse:
        return _sparse_sum(terms, call)
    for term in terms[1:]:
        combine(total, term.detach())
    return total.div_(len(terms)) if name == "avg" and len(terms) > 1 else total


def _sparse_sum(terms: Sequence[Tensor], call: Call) -> Tensor:
    if call.collective.reduce_op != "sum":
        raise NotSupported(
            f"sparse tensors are summed and not otherwise reduced, on gloo too\n  got     {call.collective}\n"
            f"  wanted  sum\n  next    reduce dense tensors"
        )
    return functools.reduce(torch.add, [term.detach() for term in terms]).coalesce()


def _undefined(tensor: Tensor) -> Tensor:
    """NaN, or the largest integer, in the form of ``tensor``."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"))
    return tensor if tensor.dtype is torch.bool else torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _root(calls: Sequence[Call]) -> int:
    return calls[0].collective.group.index(calls[0].collective.root)
