"""Linear: y = x W^T + b. Sample i's weight gradient is sum_t g_t a_t^T [p, d], its bias gradient sum_t g_t [p].

Two exact forms of the weight's squared norm, with A = activations [B, T, d] and G = backprops [B, T, p]:

* direct: ||G^T A||_F^2. 2 T d p operations, d p numbers of memory a sample; error about kappa * eps.
* Gram: <A A^T, G G^T>. 2 T^2 (d + p) operations, 2 T^2 numbers; error about kappa^2 * eps, so it loses digits (and in
  low precision may come out negative) when the sum over t cancels.

The Gram form is used for T = 1, where it is |a|^2 |g|^2 and nothing can cancel, and where it needs no more operations:
T <= d p / (d + p). Otherwise the direct form. (Where low precision matters more than time, halve that bound.)

Source: Li et al. 2021, arXiv:2110.05679, section 4; Goodfellow 2015, arXiv:1510.01799.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels import torch_norms
from . import _terms

LAYER = nn.Linear


def squared_norm(module: nn.Linear, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over the trainable ones of weight and bias; inputs [B, ..., d] and [B, ..., p]."""
    a_BTd, g_BTp = as_pair(activations, backprops)
    squared_B = torch.zeros(len(g_BTp), dtype=g_BTp.dtype, device=g_BTp.device)
    if module.weight.requires_grad:
        squared_B = squared_B + weight_squared_norm(a_BTd, g_BTp)
    if module.bias is not None and module.bias.requires_grad:
        squared_B = squared_B + bias_squared_norm(g_BTp)
    return squared_B


def flash_squared_norm(module: nn.Linear, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: ``squared_norm`` by kernels that hold no gradient; float32 for half precision and float32, else float64."""
    a_BTd, g_BTp = as_pair(activations, backprops)
    dtype = torch_norms.accumulator(a_BTd, g_BTp)
    squared_B = torch.zeros(len(g_BTp), dtype=dtype, device=g_BTp.device)
    if module.weight.requires_grad:
        squared_B = squared_B + kernels.squared_norm(a_BTd, g_BTp)
    if module.bias is not None and module.bias.requires_grad:
        squared_B = squared_B + g_BTp.sum(1, dtype=dtype).square().sum(1)
    return squared_B


def per_sample_gradient(module: nn.Linear, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, p, d], "bias": [B, p]}, trainable ones only."""
    a_BTd, g_BTp = as_pair(activations, backprops)
    gradients = {}
    if module.weight.requires_grad:
        gradients["weight"] = g_BTp.transpose(1, 2) @ a_BTd
    if module.bias is not None and module.bias.requires_grad:
        gradients["bias"] = g_BTp.sum(1)
    return gradients


def weighted_gradient(
    module: nn.Linear, activations: Tensor, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{"weight": [p, d], "bias": [p]}, trainable ones only: one matrix product over samples and positions together."""
    a_Nd = _as_sequence(activations).flatten(0, 1)
    g_Np = _as_sequence(_terms.scaled(backprops, weights_B)).flatten(0, 1)
    gradients = {}
    if module.weight.requires_grad:
        gradients["weight"] = g_Np.t() @ a_Nd
    if module.bias is not None and module.bias.requires_grad:
        gradients["bias"] = g_Np.sum(0)
    return gradients


def weight_squared_norm(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B], by the form that ``prefers_gram`` chooses."""
    chosen = gram if prefers_gram(a_BTd.shape[1], a_BTd.shape[2], g_BTp.shape[2]) else direct
    return chosen(a_BTd, g_BTp)


def prefers_gram(T: int, d: int, p: int) -> bool:
    """Whether the Gram form is the one to use for sequences of T."""
    return T == 1 or T * (d + p) <= d * p


def direct(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: || sum_t g_t a_t^T ||_F^2. The sum over t is complete before anything is squared."""
    return (g_BTp.transpose(1, 2) @ a_BTd).square().sum((1, 2))


def gram(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B]: sum over t, t' of <a_t, a_t'> <g_t, g_t'>, never below zero.

    Terms of either sign cancel, so rounding can leave a gradient that is zero (the keys of equal tokens) with a sum
    below it, whose root would be NaN and take every sample's update along.
    """
    return ((a_BTd @ a_BTd.transpose(1, 2)) * (g_BTp @ g_BTp.transpose(1, 2))).sum((1, 2)).clamp(min=0)


def bias_squared_norm(g_BTp: Tensor) -> Tensor:
    """[B]: || sum_t g_t ||^2."""
    return g_BTp.sum(1).square().sum(1)


def as_pair(activations: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T, d] and [B, T, p]."""
    return _as_sequence(activations), _as_sequence(backprops)


def _as_sequence(x: Tensor) -> Tensor:
    """[B, T, f] from [B, f] (T = 1) or from [B, ..., f], whose middle axes are positions."""
    positions = x.shape[1:-1].numel()
    return x.reshape(x.shape[0], positions, x.shape[-1])
