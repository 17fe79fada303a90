"""The forms in which a method of a process group may be called: with lists and options, or with what stands for them.

``group.broadcast(tensor, root)`` is ``group.broadcast([tensor], options)``. Torch itself always says the latter.
"""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, GatherOptions, ScatterOptions

_FORMS: Final[dict[str, tuple[int, Any, tuple[str, ...]]]] = {
    "allreduce": (1, dist.AllreduceOptions, ("reduceOp", "timeout")),
    "broadcast": (1, dist.BroadcastOptions, ("rootRank", "timeout")),
    "reduce": (1, dist.ReduceOptions, ("rootRank", "reduceOp", "timeout")),
    "allgather": (2, AllgatherOptions, ("timeout",)),
    "gather": (2, GatherOptions, ("rootRank", "timeout")),
    "scatter": (2, ScatterOptions, ("rootRank", "timeout")),
    "reduce_scatter": (2, dist.ReduceScatterOptions, ("reduceOp", "timeout")),
    "barrier": (0, dist.BarrierOptions, ("timeout",)),
}
"""By method: how many of its arguments are tensors, its options, and which of them may stand in their place."""
_NAMES: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def canonical(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call as lists and options. Tried: torch 2.13.0, whose signatures they are."""
    count, kind, places = _FORMS[name]
    asked = {_NAMES[key]: value for key, value in named.items() if key in _NAMES}
    given = [*args, *(value for key, value in named.items() if key not in _NAMES and key != "opts")]
    tensors, rest = given[:count], given[count:]
    if any(isinstance(tensor, Tensor) for tensor in tensors):
        tensors = [[tensor] if isinstance(tensor, Tensor) or tensor else [] for tensor in tensors]
    options = named.get("opts", rest[0] if rest and isinstance(rest[0], kind) else None)
    if options is None:
        options = kind()
        for place, value in {**dict(zip(places, rest, strict=False)), **asked}.items():
            if value is not None:
                setattr(options, place, value)
    return (*tensors, options)


def is_canonical(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether there is nothing to do: torch's own way, or a method that has no other."""
    form = _FORMS.get(name)
    return form is None or (not named and len(args) == form[0] + 1 and type(args[-1]) is form[1])
