"""The same squared norms in plain torch, tile by tile: for CPUs, and for float64 anywhere.

The gradient [p, d] of a sample is never held: a tile has at most ``TILE`` numbers, or one column of p if that is more.
Small samples share a tile. Half precision is widened a tile at a time, because a product of half-precision matrices is
rounded to half precision. (On CUDA, ``torch.backends.cuda.matmul.allow_tf32`` must be off, as it is by default.)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

TILE = 2**17
"""Numbers in a tile: half a megabyte in float32, which stays in a core's cache."""


def direct_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: tiles of columns of G^T A, each complete over T before it is squared."""
    B, d, p = len(a_BTd), a_BTd.shape[2], g_BTp.shape[2]
    total_B = torch.zeros(B, dtype=torch.float64, device=a_BTd.device)
    samples, columns = direct_tile(d, p)
    for rows in _blocks(B, samples):
        g_bTp = _wide(g_BTp[rows], a_BTd)
        for part in _blocks(d, columns):
            tile_bpc = gradient_tile(_wide(a_BTd[rows, :, part], g_BTp), g_bTp)
            total_B[rows] += tile_bpc.square().sum((1, 2), dtype=torch.float64)
    return total_B.to(accumulator(a_BTd, g_BTp))


def direct_tile(d: int, p: int) -> tuple[int, int]:
    """(samples, columns) of a tile [samples, p, columns] of the direct form."""
    columns = min(max(d, 1), max(1, TILE // max(p, 1)))
    return max(1, TILE // (max(p, 1) * columns)) if columns >= d else 1, columns


def gradient_tile(a_bTc: Tensor, g_bTp: Tensor) -> Tensor:
    """[b, p, c]: sum over ALL t of g_t a_t^T, for some columns c of the gradient."""
    return g_bTp.transpose(1, 2) @ a_bTc


def half_gram_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: tiles t' <= t of A A^T times those of G G^T; tiles off the diagonal count twice."""
    B, T = a_BTd.shape[:2]
    total_B = torch.zeros(B, dtype=torch.float64, device=a_BTd.device)
    side = min(max(T, 1), isqrt(TILE // 2))
    for rows in _blocks(B, max(1, TILE // (2 * side * side))):
        for late in _blocks(T, side):
            a_bsd, g_bsp = _wide(a_BTd[rows, late], g_BTp), _wide(g_BTp[rows, late], a_BTd)
            for early in _blocks(late.stop, side):
                a_btd, g_btp = _wide(a_BTd[rows, early], g_BTp), _wide(g_BTp[rows, early], a_BTd)
                tile_bst = (a_bsd @ a_btd.transpose(1, 2)) * (g_bsp @ g_btp.transpose(1, 2))
                weight = 1 if early.start == late.start else 2
                total_B[rows] += weight * tile_bst.sum((1, 2), dtype=torch.float64)
    return total_B.clamp(min=0).to(accumulator(a_BTd, g_BTp))


def bmm_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: from the whole gradients [B, p, d], in the accumulator's dtype."""
    dtype = accumulator(a_BTd, g_BTp)
    if a_BTd.is_cuda and a_BTd.dtype == g_BTp.dtype != dtype:
        gradient_Bpd = torch.bmm(g_BTp.transpose(1, 2), a_BTd, out_dtype=dtype)
    else:
        gradient_Bpd = gradient_tile(a_BTd.to(dtype), g_BTp.to(dtype))
    return gradient_Bpd.square().sum((1, 2), dtype=torch.float64).to(dtype)


def accumulator(a_BTd: Tensor, g_BTp: Tensor) -> torch.dtype:
    """The dtype of sums over t, and of the result: float64 if an input is, else float32."""
    return torch.float64 if torch.float64 in (a_BTd.dtype, g_BTp.dtype) else torch.float32


def _wide(tile: Tensor, other: Tensor) -> Tensor:
    return tile.to(accumulator(tile, other))


def _blocks(extent: int, width: int) -> Iterator[slice]:
    for start in range(0, extent, width):
        yield slice(start, min(start + width, extent))
