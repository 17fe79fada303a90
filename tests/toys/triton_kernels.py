"""One small Triton kernel, right and with mistakes that kernels have; for the interpreter's process alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16


@triton.jit
def _partials(
    a_ptr, g_ptr, out_ptr, T, d, p, tiles, steps, a_B, a_T, a_d, g_B, g_T, g_p,
    TILE: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, ATOMIC: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Program b * tiles + tile: the sum of squares of some columns of sample b's gradient."""
    tile, b = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    column, row = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    gradient = tl.zeros([WIDTH, TILE], tl.float32)
    for t in range(0, steps):
        if MASK:
            a = tl.load(a_ptr + b * a_B + t * a_T + column * a_d, mask=column < d, other=0.0)
        else:
            a = tl.load(a_ptr + b * a_B + t * a_T + column * a_d)
        g = tl.load(g_ptr + b * g_B + t * g_T + row * g_p, mask=row < p, other=0.0)
        gradient += g.to(tl.float32)[:, None] * a.to(tl.float32)[None, :]
    partial = tl.sum(tl.sum(gradient * gradient, 1), 0)
    if ATOMIC:
        tl.atomic_add(out_ptr + b, partial)
    else:
        tl.store(out_ptr + tl.program_id(0) + SHIFT, partial)


class _Bound:
    """A loop bound that the interpreter leaves as it is."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __index__(self) -> int:
        return self.bound


def squared_norm(
    a_BTd: Tensor, g_BTp: Tensor, mask: bool = True, atomic: bool = False, shift: int = 0, cleared: bool = True
) -> Tensor:
    """[B] float32. ``cleared``: whether the memory that partials are written to is zero before."""
    (B, T, d), p = a_BTd.shape, g_BTp.shape[2]
    tiles, new = -(-d // TILE), torch.zeros if cleared else torch.empty
    out = new(B) if atomic else new(B, tiles)
    if B * tiles:
        width = max(16, triton.next_power_of_2(p))
        _partials[B * tiles,](
            a_BTd, g_BTp, out, T, d, p, tiles, _Bound(T), *a_BTd.stride(), *g_BTp.stride(),
            TILE, width, mask, atomic, shift,
        )  # fmt: skip
    return out if atomic else out.sum(1)
