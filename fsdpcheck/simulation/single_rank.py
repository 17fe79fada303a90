"""One rank that runs alone as the first of W: every call ends at once, as if the others did what it does.

What it calls, with which shapes and in which groups, is then what it would call among W ranks, for any W, at the price
of one: as long as that depends on no value that another rank would send. Values are those of W equal ranks; what only
others could know, such as a message, is zeros.

Legend: W members of a group, me this rank's place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpcheck.errors import explain
from fsdpcheck.execution import Failure, RankState, deadlock
from fsdpcheck.execution.recording import Call
from fsdpcheck.simulation.exchange import Exchange

Results = list[Tensor]


def exchange(rank: int, call: Call) -> Exchange:
    """A call of this rank that has ended, with its outputs, one a tensor that it gave for one."""
    members = call.collective.group
    found = _RESULTS[call.collective.op](call, len(members), members.index(rank) if rank in members else 0)
    fitting = [
        value if value.numel() == output.numel() else torch.zeros_like(output)
        for output, value in zip(call.outputs, found, strict=False)
    ]
    return Exchange(results={rank: fitting}, complete=True)


def payload(call: Call) -> int:
    """Bytes that a call is about in all: of a gather the whole, of a message what it carries."""
    op, members = call.collective.op, len(call.collective.group)
    if op == "gather" and not call.outputs:
        return members * _bytes(call.inputs)
    if op == "scatter" and not call.inputs:
        return members * _bytes(call.outputs)
    if op in ("all_gather", "gather"):
        return _bytes(call.outputs)
    return _bytes(call.inputs or call.outputs)


def _bytes(tensors: Sequence[Tensor]) -> int:
    parts = [part for one in tensors for part in ((one._indices(), one._values()) if one.is_sparse else (one,))]
    return sum(part.numel() * part.element_size() for part in parts)


def waits_for_another(size: int, states: Mapping[int, deadlock.State]) -> Failure:
    """The failure of a rank alone that waits for what only another rank would do."""
    blocked = [state for state in states.values() if isinstance(state, deadlock.Blocked)]
    text = explain(
        f"rank 0 runs alone, as the first of {size}, and waits for what another rank would do",
        got="; ".join(f"{state.collective}, at {state.where}" for state in blocked),
        wanted="a program that asks the others for nothing but calls of its groups",
        then="fsdpcheck simulate -n 4 runs all ranks",
    )
    where = tuple(RankState(one.rank, "blocked", str(one.collective), one.where, one.stack) for one in blocked)
    return Failure("adapter", text, where)


@contextmanager
def steps_noted(steps: list[int], calls: Sequence[object]) -> Iterator[None]:
    """While open, ``steps`` gets the number of ``calls`` made, each time the optimizer that stepped first steps."""
    first: list[torch.optim.Optimizer] = []

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first[:] = first or [optimizer]
        if optimizer is first[0]:
            steps.append(len(calls))

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()


def _reduced(call: Call, tensor: Tensor, size: int) -> Tensor:
    """What W equal tensors give."""
    name = call.collective.reduce_op
    if call.factor is not None:
        return tensor.detach() * (call.factor * size)
    if name == "sum":
        return tensor.detach() * size
    if name == "product":
        return tensor.detach() ** size
    return tensor.detach() if name != "bxor" or size % 2 else torch.zeros_like(tensor)


def _all_reduce(call: Call, size: int, me: int) -> Results:
    return [_reduced(call, tensor, size) for tensor in call.inputs]


def _all_gather(call: Call, size: int, me: int) -> Results:
    if call.packed:
        return [tensor.detach().reshape(-1).repeat(size) for tensor in call.inputs]
    return [tensor.detach() for tensor in call.inputs for _ in range(size)]


def _reduce_scatter(call: Call, size: int, me: int) -> Results:
    if call.packed:
        return [_reduced(call, tensor.detach().reshape(size, -1)[me], size) for tensor in call.inputs]
    return [_reduced(call, call.inputs[first + me], size) for first in range(0, len(call.inputs), size)]


def _is_root(call: Call, me: int) -> bool:
    return call.collective.group[me] == call.collective.root


def _gather(call: Call, size: int, me: int) -> Results:
    return [call.inputs[0].detach()] * size if _is_root(call, me) else []


def _scatter(call: Call, size: int, me: int) -> Results:
    return [call.inputs[me].detach()] if _is_root(call, me) else _nothing_known(call, size, me)


def _all_to_all(call: Call, size: int, me: int) -> Results:
    return [call.inputs[me].detach()] * size


def _as_it_was(call: Call, size: int, me: int) -> Results:
    return []


def _nothing_known(call: Call, size: int, me: int) -> Results:
    return [torch.zeros_like(output) for output in call.outputs]


_RESULTS: Final[dict[str, Callable[[Call, int, int], Results]]] = {
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "broadcast": _as_it_was,
    "barrier": _as_it_was,
    "monitored_barrier": _as_it_was,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send": _as_it_was,
    "recv": _nothing_known,
    "recv_anysource": _nothing_known,
}
