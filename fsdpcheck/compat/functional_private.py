"""Functional collectives, which DTensor calls, as calls of their groups. Tried: torch 2.13.0; read: 2.11.0.

They are operators, ``_c10d_functional.all_reduce`` for one, whose kernels call the group. A dispatch mode that stands
for kernels, as FakeTensorMode does, gives the shape of their result and calls nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_NAMESPACES: Final = ("_c10d_functional", "_dtensor")
_SILENT: Final = ("mesh_get_process_group", "_wrap_tensor_autograd")
"""Of these, what calls no group."""


def is_one(func: Any) -> bool:
    """Whether an operator is a functional collective, or waits for one."""
    return func.namespace in _NAMESPACES and func.overloadpacket.__name__ not in _SILENT


def by_its_group(func: Any) -> Callable[..., Any] | None:
    """What gives its result by the method of its group; None for one that is not known here."""
    return _CALLS.get(func.overloadpacket.__name__)


def _group(name: Any) -> Any:
    return cast(Any, distributed_c10d)._resolve_process_group(name) if isinstance(name, str) else name


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _all_reduce_(tensor: Tensor, op: str, group: Any) -> Tensor:
    dist.all_reduce(tensor, _op(op), _group(group), async_op=True).wait()
    return tensor


def _broadcast_(tensor: Tensor, source: int, group: Any) -> Tensor:
    dist.broadcast(tensor, group=_group(group), group_src=source, async_op=True).wait()
    return tensor


def _all_gather(tensor: Tensor, size: int, group: Any, out: Tensor | None = None) -> Tensor:
    found = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:])) if out is None else out
    dist.all_gather_into_tensor(found, tensor, _group(group), async_op=True).wait()
    return found


def _reduce_scatter(tensor: Tensor, op: str, size: int, group: Any, out: Tensor | None = None) -> Tensor:
    found = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:])) if out is None else out
    dist.reduce_scatter_tensor(found, tensor, _op(op), _group(group), async_op=True).wait()
    return found


def _all_to_all(tensor: Tensor, taken: list[int], sent: list[int], group: Any) -> Tensor:
    found = tensor.new_empty((sum(taken), *tensor.shape[1:]))
    dist.all_to_all_single(found, tensor, taken, sent, _group(group), async_op=True).wait()
    return found


def _shard_dim_alltoall(tensor: Tensor, gather_dim: int, shard_dim: int, group: Any) -> Tensor:
    """As on CPU: all is gathered, and of it this rank's part is kept."""
    place = _group(group)
    pieces = [torch.empty_like(tensor) for _ in range(place.size())]
    dist.all_gather(pieces, tensor.contiguous(), place)
    mine: Tensor = torch.cat(pieces, gather_dim).chunk(place.size(), shard_dim)[place.rank()]
    return mine.contiguous()


def _of_each(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda tensors, *rest: [one(tensor, *rest) for tensor in tensors]


def _of_a_copy(one: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda tensor, *rest: one(tensor.clone(), *rest)


_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "wait_tensor": lambda tensor: tensor,
    "all_reduce": _of_a_copy(_all_reduce_),
    "all_reduce_": _all_reduce_,
    "all_reduce_coalesced": _of_each(_of_a_copy(_all_reduce_)),
    "all_reduce_coalesced_": _of_each(_all_reduce_),
    "broadcast": _of_a_copy(_broadcast_),
    "broadcast_": _broadcast_,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _of_each(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _of_each(_reduce_scatter),
    "all_to_all_single": _all_to_all,
    "shard_dim_alltoall": _shard_dim_alltoall,
}
