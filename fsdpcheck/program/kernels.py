"""What the process of a kernel case runs: every kernel of the adapter on the case's tensors, in several ways.

Memory is guarded: tensors lie in NaN, and so does whatever a kernel allocates by torch, which is NaN itself where it is
allocated empty. So a read outside, or of memory that nobody wrote, comes out as NaN, and a write outside is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.adapters.capabilities import Kernel, Kernels
from fsdpcheck.adapters.contract import Adapter
from fsdpcheck.case import KernelCase
from fsdpcheck.case.kernel import KernelSpec
from fsdpcheck.compat import triton_private
from fsdpcheck.errors import AdapterError, explain
from fsdpcheck.execution import RankResult
from fsdpcheck.program import kernel_data
from fsdpcheck.program.kernel_data import MARGIN, Guarded

KERNEL = "kernel"
"""Who observed ("kernel", name of the kernel, 0, ``Computed``)."""
_SENTINEL = 77
"""What guards memory of integers."""


@dataclass(frozen=True)
class Computed:
    """What one kernel gave: ``once`` [B].

    Where the case is repeated also ``again``, in the same order, and ``reversed``, with the programs of every launch in
    the opposite one. ``touched``: which memory was written to that is none of its own.
    """

    once: Tensor
    again: Tensor | None
    reversed: Tensor | None
    touched: tuple[str, ...]


def compute(case: KernelCase, adapter: Adapter, result: RankResult) -> None:
    """Add an observation for each kernel. Raises whatever a kernel raises, with its name, and AdapterError."""
    given = _given(case)
    for name, kernel in cast(Kernels, adapter).kernels().items():
        try:
            result.observations.append((KERNEL, name, 0, _computed(kernel, given, case.kernel, adapter)))
        except Exception as error:
            error.add_note(f"in the kernel {name!r}")
            raise


def _given(case: KernelCase) -> tuple[Guarded, Guarded]:
    spec = case.kernel
    activations, backprops = kernel_data.tensors(spec, case.seed)
    given = Guarded(activations, spec.memory[0]), Guarded(backprops, spec.memory[1])
    place = kernel_data.spoiled(spec, case.seed)
    if place is not None:
        given[place[0]].spoil(place[1:], float(spec.spoil))
    return given


def _computed(kernel: Kernel, given: tuple[Guarded, Guarded], spec: KernelSpec, adapter: Adapter) -> Computed:
    activations, backprops = given
    with _Workspace() as workspace:
        once = _checked(kernel(activations.tensor, backprops.tensor), adapter)
    touched = [name for name, each in zip(("activations", "backprops"), given, strict=True) if each.changed]
    touched += ["memory beside what it allocated"] * workspace.overrun
    again = backwards = None
    if spec.repeated:
        again = kernel(activations.tensor, backprops.tensor).clone()
        with triton_private.reversed_grid():
            backwards = kernel(activations.tensor, backprops.tensor).clone()
    return Computed(once, again, backwards, tuple(touched))


def _checked(value: Any, adapter: Adapter) -> Tensor:
    if type(value) is Tensor and value.dim() == 1 and value.dtype in (torch.float32, torch.float64):
        return value.detach().clone()
    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    what = f"a kernel of adapter {adapter.name!r} returned something else than norms"
    wanted, then = "a tensor [B], float32 or float64", "see fsdpcheck.adapter.Kernel"
    raise AdapterError(explain(what, got=got, wanted=wanted, then=then))


class _Workspace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts what is allocated under it into guarded memory; what is allocated empty is NaN."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _EMPTY | _FILLED or not isinstance(out, Tensor) or out.is_meta:
            return out
        sentinel = float("nan") if out.dtype.is_floating_point else min(_SENTINEL, torch.iinfo(out.dtype).max)
        extent = sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True)) + 1
        room = torch.full(((extent if out.numel() else 0) + 2 * MARGIN,), sentinel, dtype=out.dtype)
        self._rooms.append((room, room.numel() - MARGIN))
        placed = room.as_strided(out.shape, out.stride(), MARGIN)
        return placed if name in _EMPTY else placed.copy_(out)

    @property
    def overrun(self) -> bool:
        """Whether anything was written beside what was allocated."""
        margins = [margin for room, end in self._rooms for margin in (room[:MARGIN], room[end:])]
        return any(not bool(_untouched(margin).all()) for margin in margins)


def _untouched(margin: Tensor) -> Tensor:
    return margin.isnan() if margin.dtype.is_floating_point else margin == min(_SENTINEL, torch.iinfo(margin.dtype).max)


_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_FILLED = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like", "new_ones"}
