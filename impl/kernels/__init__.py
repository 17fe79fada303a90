"""Squared norms of a Linear weight's per-sample gradients by kernels that never hold such a gradient.

A = activations [B, T, d], G = backprops [B, T, p]; sample i's gradient is G_i^T A_i [p, d], wanted is its squared norm.

* ``direct_squared_norm``: tiles of G^T A, each summed over ALL of T before it is squared. 2 T d p operations.
* ``half_gram_squared_norm``: <A A^T, G G^T> from the tiles on and below the diagonal. T^2 (d + p) operations.
* ``bmm_squared_norm``: the gradients themselves by one batched product. It holds them: only where that is fastest.
* ``squared_norm``: the form that ``choice.form`` names, a function of T, d, p, dtype and device, never of B or of data.

Guarantees of all. Inputs in float16, bfloat16, float32 (mixed ones are widened) are accumulated in float32 and give
float32 [B]; float64 is accumulated in float64 and gives float64. No atomics: each tile leaves one partial, and partials
are added in float64 in one fixed order, so equal inputs give equal bits. A sample with a NaN has norm NaN, never 0. No
gradient flows. When every product and every partial sum is exact, the result is the exact integer, whatever the form.

Triton kernels (``triton_norms``) run on CUDA devices, or interpreted on any device where ``TRITON_INTERPRET=1`` was set
before the process started; everything else, float64 too, runs in plain torch (``torch_norms``), with equal guarantees.
Triton is optional and imported at the first use: ``pip install fsdpcheck[kernels]``.

Source: ghost norm, Li et al. 2021, arXiv:2110.05679; Triton, Tillet et al. 2019, doi:10.1145/3315508.3329973.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import choice, torch_norms


def squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: ||G^T A||_F^2 of each sample, by the form that suits the shape; see the package for the guarantees."""
    _check(a_BTd, g_BTp)
    named = {"direct": direct_squared_norm, "half_gram": half_gram_squared_norm, "bmm": bmm_squared_norm}
    chosen = choice.form(a_BTd.shape[1], a_BTd.shape[2], g_BTp.shape[2], a_BTd.dtype, a_BTd.device)
    return named[chosen](a_BTd, g_BTp)


@torch.no_grad()
def direct_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: every tile of G^T A squared after its sum over all of T; error of norm^2 about kappa * eps."""
    _check(a_BTd, g_BTp)
    result: Tensor = implementation(a_BTd, g_BTp).direct_squared_norm(a_BTd, g_BTp)
    return result


@torch.no_grad()
def half_gram_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: sum over t' <= t, doubled off the diagonal, of <a_t, a_t'> <g_t, g_t'>; never below zero.

    Its error is about kappa^2 * eps: it loses digits when the sum over t cancels.
    """
    _check(a_BTd, g_BTp)
    result: Tensor = implementation(a_BTd, g_BTp).half_gram_squared_norm(a_BTd, g_BTp)
    return result


@torch.no_grad()
def bmm_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: the gradients [B, p, d] formed in the accumulator's dtype by one batched product, then squared."""
    _check(a_BTd, g_BTp)
    return torch_norms.bmm_squared_norm(a_BTd, g_BTp)


def implementation(a_BTd: Tensor, g_BTp: Tensor) -> ModuleType:
    """``triton_norms`` or ``torch_norms``: which of them takes these tensors."""
    if torch.float64 in (a_BTd.dtype, g_BTp.dtype) or not _triton_runs_on(a_BTd.device):
        return torch_norms
    return importlib.import_module(f"{__name__}.triton_norms")


def _triton_runs_on(device: torch.device) -> bool:
    return (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check(a_BTd: Tensor, g_BTp: Tensor) -> None:
    if a_BTd.dim() != 3 or g_BTp.dim() != 3 or a_BTd.shape[:2] != g_BTp.shape[:2]:
        raise ValueError(
            f"got activations {list(a_BTd.shape)} and backprops {list(g_BTp.shape)}, wanted [B, T, d] and [B, T, p]: "
            "flatten the positions of the sequence into one axis, add T = 1 where there is none"
        )
    if not (a_BTd.is_floating_point() and g_BTp.is_floating_point()) or a_BTd.device != g_BTp.device:
        raise TypeError(
            f"got activations in {a_BTd.dtype} on {a_BTd.device} and backprops in {g_BTp.dtype} on {g_BTp.device}, "
            "wanted floating point on one device"
        )
