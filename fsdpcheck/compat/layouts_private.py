"""Where a rank's part of a sharded tensor stands in the whole: what DTensor, FSDP1 and ShardedTensor keep of it.

Nothing here communicates. Tried: 2.13.0 unless a line says otherwise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdpcheck.compat.observers_private import unobserved


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way on this thread, in which parameters are not themselves."""
    return bool(cast(Any, torch._C)._are_functorch_transforms_active())


def _untransformed() -> AbstractContextManager[object]:
    if not is_transformed():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def untransformed(tensor: Tensor) -> Tensor:
    """What transforms of torch.func wrap, with the dimension that vmap maps in front; any other tensor as it is."""
    transforms = cast(Any, torch._C)._functorch
    while transforms.is_functorch_wrapped_tensor(tensor):
        dimension = transforms.maybe_get_bdim(tensor)
        tensor = transforms.get_unwrapped(tensor)
        if dimension > 0:
            tensor = tensor.movedim(dimension, 0)
    return tensor


def without_function_modes() -> AbstractContextManager[object]:
    """While open, no mode of a program sees functions of torch that this thread calls."""
    return cast("AbstractContextManager[object]", cast(Any, torch._C).DisableTorchFunction())


class _Here(threading.local):
    aside = False


_here = _Here()


@contextmanager
def aside() -> Iterator[None]:
    """While open, this thread computes without gradients, and nothing of a program's sees or transforms it."""
    if _here.aside:
        yield
        return
    _here.aside = True
    try:
        with _untransformed(), unobserved(), without_function_modes(), torch.no_grad():
            yield
    finally:
        _here.aside = False


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies on its mesh, seen from this rank.

    ``indices``: by dimension that is sharded, which indices of it this rank has, in order. ``partial``: "" or how ranks
    are to be put together ("sum", "avg", "max", "min", "norm 2.0"), by each dimension of the mesh that is partial.
    ``parts``: how many ranks have a part of each value. ``replica``: where the rank is on dimensions that repeat.
    """

    shape: tuple[int, ...]
    indices: dict[int, Tensor]
    partial: tuple[str, ...] = ()
    parts: int = 1
    replica: tuple[int, ...] = ()


def layout_key(tensor: Any) -> tuple[object, ...]:
    """What its layout depends on."""
    mesh = tensor.device_mesh
    return tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), tuple(tensor.placements)


def layout_of(tensor: Any) -> Layout | None:
    """That of a DTensor; None on a rank that is not on its mesh."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    indices: dict[int, Tensor] = {}
    partial: list[str] = []
    replica: list[int] = []
    parts = 1
    for number, placement in enumerate(tensor.placements):
        size, here = mesh.size(number), coordinate[number]
        if isinstance(placement, Shard | _StridedShard):
            before = indices.get(placement.dim)
            before = torch.arange(shape[placement.dim], device="cpu") if before is None else before
            indices[placement.dim] = before[_taken(placement, len(before), size, here)]
        elif placement.is_partial():
            norm = getattr(placement, "norm_type", None)
            partial.append(str(placement.reduce_op) if norm is None else f"norm {float(norm)}")
            parts *= size
        else:
            replica.append(here)
    return Layout(shape, indices, tuple(partial), parts, tuple(replica))


def companions(tensor: Any) -> tuple[int, ...]:
    """The ranks that together have one whole of a DTensor, this one among them: those along the dimensions of its mesh
    that do not repeat it. Of a rank that is not on its mesh none."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    with unobserved():
        repeats = [placement.is_replicate() for placement in tensor.placements]
        along = tuple(here if same else slice(None) for same, here in zip(repeats, coordinate, strict=True))
        return tuple(mesh.mesh[along].reshape(-1).tolist())


def _taken(placement: Any, length: int, size: int, here: int) -> Tensor:
    """Which of ``length`` indices the part ``here`` of ``size`` has, in order."""
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):  # each piece is shared out by itself. Tried: 2.11.0 (read), 2.13.0
        everything = torch.arange(length, device="cpu")
        pieces = [torch.chunk(piece, size) for piece in torch.chunk(everything, int(placement.split_factor))]
        return torch.cat([everything[:0], *(parts[here] for parts in pieces if here < len(parts))])
    most = -(-length // size)  # as torch.chunk
    return torch.arange(min(length, most * here), min(length, most * (here + 1)), device="cpu")


def waited(tensor: Tensor) -> Tensor:
    """The tensor that an asynchronous functional collective returned, when it is there; any other as it is."""
    wait = getattr(tensor, "trigger_wait", None) if type(tensor).__name__ == "AsyncCollectiveTensor" else None
    return tensor if wait is None else cast(Tensor, wait())


@dataclass(frozen=True)
class FlatPart:
    """What this rank's part of FSDP1's flat parameter has of one parameter of the model.

    ``name``: below the module that FSDP wraps. ``offset``, ``count``: where in the rank's part; ``first``: from which
    value of the parameter on, in the order of its memory. ``strides``: where that is not the order of its places.
    ``local``: values of the rank's part, with padding. ``flat``: whether the optimizer has the flat parameter itself.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    count: int
    first: int
    strides: tuple[int, ...] | None
    local: int
    flat: bool
    converted: bool
    """By an extension, of a DTensor say: then it is a part of a part."""

    def places(self) -> Tensor:
        """Of its values, in the flattened parameter."""
        there = torch.arange(self.first, self.first + self.count, device="cpu")
        if self.strides is None:
            return there
        order = torch.arange(math.prod(self.shape), device="cpu")
        place_of = torch.empty_like(order)
        place_of[order.as_strided(self.shape, self.strides).flatten()] = order
        return place_of[there]


def flat_parameter_of(module: nn.Module) -> Any:
    """The flat parameter that FSDP1 made of parameters in ``module``, which it wraps; None where it made none."""
    handle = getattr(module, "_handle", None) if "_fsdp_wrapped_module" in module._modules else None
    return None if handle is None else handle.flat_param


def is_flat(parameter: Tensor) -> bool:
    """Whether it is FSDP1's flat parameter."""
    return bool(getattr(parameter, "_is_flat_param", False)) and hasattr(parameter, "_fqns")


def originals_of(flat: Any) -> Sequence[Tensor]:
    """The parameters of the model that the optimizer has in place of the flat one; () where it has the flat one."""
    return flat._params or ()


def parts_of(flat: Any) -> Iterator[FlatPart]:
    """Of each parameter of the model, in their order."""
    contiguous, extensions = flat._contiguities, flat._param_extensions
    for number, (name, shape, there) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):
        yield FlatPart(
            name=name,
            shape=tuple(shape),
            offset=there.offset_in_shard or 0,
            count=there.numel_in_shard or 0,
            first=there.intra_param_start_idx or 0,
            strides=None if contiguous[number] else tuple(flat._strides[number]),
            local=flat._sharded_size.numel(),
            flat=flat._params is None,
            converted=extensions[number] is not None,
        )


@dataclass(frozen=True)
class LocalShard:
    """One of a rank's blocks of a ShardedTensor."""

    shape: tuple[int, ...]
    values: Tensor
    offsets: tuple[int, ...]


def blocks_of(tensor: object) -> Iterator[LocalShard] | None:
    """A rank's blocks of a ShardedTensor; None where it is none."""
    if type(tensor).__name__ != "ShardedTensor":
        return None
    sharded: Any = tensor
    shape = tuple(sharded.size())
    return (LocalShard(shape, shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in sharded.local_shards())
