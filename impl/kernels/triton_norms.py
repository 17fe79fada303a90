"""The squared norms as Triton kernels: one program a tile, one partial a program, one fixed-order second pass.

A tile of the gradient (or of the two Gram matrices) lives in registers, is summed over its whole contraction axis, then
squared (or multiplied) and added up to one float32 partial, which is the only thing that leaves the program. The second
pass adds a sample's partials in float64, in one order. Workspace: ``direct_partials`` or ``half_gram_partials`` numbers
of 4 bytes a sample, against d p numbers of a gradient.

float32 is multiplied in float32 (never TF32), half precision exactly. Inputs may have any strides. The interpreter's
``tl.dot`` cannot multiply bfloat16: there, and where dtypes are mixed, tiles are widened to float32 before the product,
which changes nothing, since products of half-precision numbers are exact in float32.

This file needs triton; the package imports it at the first use of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """A program's tile: ``rows`` x ``columns`` of the result, ``depth`` of the contraction axis at a time.

    Powers of two from 16 up. The half-Gram form needs rows = columns. ``warps`` and ``stages`` are Triton's.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


HALF_TILES = Tiles(128, 128, 64, warps=8, stages=3)
FULL_TILES = Tiles(64, 64, 32)
WIDTH = 128
"""Partials that the second pass reads at a time."""


@triton.jit
def _product(x, y, total, WIDEN: tl.constexpr):
    """``total`` [m, n] + ``x`` [m, k] @ ``y`` [k, n]."""
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def _contract(
    x_ptr, y_ptr, rows, columns, depth, steps, first_row, first_column, x_row, x_k, y_k, y_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS]: one tile of x [rows, depth] @ y [depth, columns], over all of ``depth`` in ``steps`` steps."""
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_row + k.to(tl.int64)[None, :] * x_k
    y_ptrs = y_ptr + k.to(tl.int64)[:, None] * y_k + column.to(tl.int64)[None, :] * y_column
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, steps):
        inside = k < depth - step * DEPTH
        x = tl.load(x_ptrs, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        y = tl.load(y_ptrs, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
        total = _product(x, y, total, WIDEN)
        x_ptrs += DEPTH * x_k
        y_ptrs += DEPTH * y_k
    return total


@triton.jit
def _direct_partials(
    a_ptr, g_ptr, partials_ptr, T, d, p, tiles, steps, a_B, a_T, a_d, g_B, g_T, g_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program b * tiles + tile: the sum of squares of one tile of sample b's G^T A."""
    tile, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    across = tl.cdiv(d, COLUMNS)
    gradient = _contract(
        g_ptr + b * g_B, a_ptr + b * a_B, p, d, T, steps, tile // across * ROWS, tile % across * COLUMNS,
        g_p, g_T, a_T, a_d, ROWS, COLUMNS, DEPTH, WIDEN,
    )  # fmt: skip
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.sum(gradient * gradient, 1), 0))


@triton.jit
def _half_gram_partials(
    a_ptr, g_ptr, partials_ptr, T, d, p, tiles, a_steps, g_steps, a_B, a_T, a_d, g_B, g_T, g_p,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program b * tiles + tile: that tile of the lower triangle of sample b's (A A^T) * (G G^T), summed."""
    tile, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    late = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)  # the root is rounded: one off at most
    late = tl.where(late * (late + 1) // 2 > tile, late - 1, late)
    late = tl.where((late + 1) * (late + 2) // 2 <= tile, late + 1, late)
    early = tile - late * (late + 1) // 2
    a_ptr += b * a_B
    g_ptr += b * g_B
    row, column = late * SIDE, early * SIDE
    of_a = _contract(a_ptr, a_ptr, T, T, d, a_steps, row, column, a_T, a_d, a_d, a_T, SIDE, SIDE, DEPTH, WIDEN)
    of_g = _contract(g_ptr, g_ptr, T, T, p, g_steps, row, column, g_T, g_p, g_p, g_T, SIDE, SIDE, DEPTH, WIDEN)
    weight = tl.where(late == early, 1.0, 2.0)
    tl.store(partials_ptr + tl.program_id(0), weight * tl.sum(tl.sum(of_a * of_g, 1), 0))


@triton.jit
def _add_partials(partials_ptr, squared_ptr, count, steps, WIDTH: tl.constexpr):
    """Program b: sample b's partials added in float64. Below zero is rounding: 0. NaN stays: no ``tl.maximum``."""
    b = tl.program_id(0).to(tl.int64)
    total = tl.zeros([WIDTH], tl.float64)
    for step in range(0, steps):
        i = step * WIDTH + tl.arange(0, WIDTH)
        total += tl.load(partials_ptr + b * count + i, mask=i < count, other=0.0).to(tl.float64)
    squared = tl.sum(total, 0)
    tl.store(squared_ptr + b, tl.where(squared < 0.0, 0.0, squared).to(tl.float32))


INTERPRETED = not isinstance(_direct_partials, triton.JITFunction)


def direct_squared_norm(a_BTd: Tensor, g_BTp: Tensor, tiles: Tiles | None = None) -> Tensor:
    """[B] float32 from activations [B, T, d] and backprops [B, T, p]."""
    (_, T, d), p = a_BTd.shape, g_BTp.shape[2]
    tiles = tiles or _fitted(_preferred(a_BTd, g_BTp), p, d, T)
    partials = _workspace(a_BTd, direct_partials(d, p, tiles))
    if partials.numel() > 0:
        _direct_partials[partials.numel(),](
            a_BTd, g_BTp, partials, T, d, p, partials.shape[1], _steps(T, tiles.depth),
            *a_BTd.stride(), *g_BTp.stride(),
            tiles.rows, tiles.columns, tiles.depth, _widens(a_BTd, g_BTp), **_launch(tiles),
        )  # fmt: skip
    return _added(partials)


def half_gram_squared_norm(a_BTd: Tensor, g_BTp: Tensor, tiles: Tiles | None = None) -> Tensor:
    """[B] float32 from activations [B, T, d] and backprops [B, T, p]."""
    (_, T, d), p = a_BTd.shape, g_BTp.shape[2]
    tiles = tiles or _fitted(_preferred(a_BTd, g_BTp), T, T, max(d, p))
    partials = _workspace(a_BTd, half_gram_partials(T, tiles))
    if partials.numel() > 0:
        _half_gram_partials[partials.numel(),](
            a_BTd, g_BTp, partials, T, d, p, partials.shape[1], _steps(d, tiles.depth), _steps(p, tiles.depth),
            *a_BTd.stride(), *g_BTp.stride(),
            tiles.rows, tiles.depth, _widens(a_BTd, g_BTp), **_launch(tiles),
        )  # fmt: skip
    return _added(partials)


def direct_partials(d: int, p: int, tiles: Tiles) -> int:
    """How many partials the direct form leaves a sample."""
    return -(-p // tiles.rows) * -(-d // tiles.columns)


def half_gram_partials(T: int, tiles: Tiles) -> int:
    """How many partials the half-Gram form leaves a sample."""
    along = -(-T // tiles.rows)
    return along * (along + 1) // 2


class _Bound:
    """A loop bound for the interpreter, which turns an int into an array that numpy 2.4 does not turn back."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __index__(self) -> int:
        return self.bound


def _steps(extent: int, width: int) -> int | _Bound:
    return _Bound(-(-extent // width)) if INTERPRETED else -(-extent // width)


def _added(partials_BN: Tensor) -> Tensor:
    squared_B = torch.zeros(len(partials_BN), dtype=torch.float32, device=partials_BN.device)
    if partials_BN.numel() > 0:
        count = partials_BN.shape[1]
        _add_partials[len(partials_BN),](partials_BN, squared_B, count, _steps(count, WIDTH), WIDTH)
    return squared_B


def _workspace(like: Tensor, partials: int) -> Tensor:
    if INTERPRETED or like.device.type != "cpu":
        return torch.empty(len(like), partials, dtype=torch.float32, device=like.device)
    raise RuntimeError(
        "TRITON_INTERPRET=1 was set after triton had been imported, so its kernels are compiled ones and take no CPU "
        "tensors: set it before the process starts"
    )


def _preferred(a_BTd: Tensor, g_BTp: Tensor) -> Tiles:
    return FULL_TILES if torch.float32 in (a_BTd.dtype, g_BTp.dtype) else HALF_TILES


def _fitted(tiles: Tiles, rows: int, columns: int, depth: int) -> Tiles:
    """``tiles``, no wider than the matrix needs; square stays square if the matrix is."""
    return replace(
        tiles, rows=_width(tiles.rows, rows), columns=_width(tiles.columns, columns), depth=_width(tiles.depth, depth)
    )


def _width(most: int, extent: int) -> int:
    return max(16, min(most, int(triton.next_power_of_2(max(extent, 1)))))


def _widens(a_BTd: Tensor, g_BTp: Tensor) -> bool:
    return INTERPRETED or a_BTd.dtype != g_BTp.dtype


def _launch(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
