"""Convolutions: with the input cut into patches, a Linear at every position of the output, one for each group.

P positions of the output, h = groups, k = elements of the kernel. A = patches [B, h, P, (C_in / h) k], G = backprops
[B, h, P, C_out / h]; sample i's weight gradient is, group by group, sum_t g_t a_t^T. The two exact forms and the rule
that chooses between them are those of ``linear``, with T = P, d = C_in k / h, p = C_out / h: Gram where P = 1 or
P <= d p / (d + p), else direct. Patches take k times the input's memory; ``weighted_gradient`` forms none.

Every option is covered: stride, dilation, groups, padding as numbers, "same" or "valid", and all padding modes (the
input is padded as the layer pads it, and the rest is a convolution without padding).

Source: Bu et al. 2022, arXiv:2205.10683 (mixed ghost clipping); Rochette et al. 2019, arXiv:1912.06015.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from . import _terms, linear

LAYER = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def squared_norm(module: _Conv, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over the trainable ones of weight and bias; [B, C_in, ...] and [B, C_out, ...]."""
    squared_B = backprops.new_zeros(len(backprops))
    if module.weight.requires_grad:
        a_BhPd, g_BhPp = patches(module, activations), by_group(module, backprops)
        squared_Bh = linear.weight_squared_norm(a_BhPd.flatten(0, 1), g_BhPp.flatten(0, 1))
        squared_B = squared_B + squared_Bh.reshape(len(backprops), module.groups).sum(1)
    if module.bias is not None and module.bias.requires_grad:
        squared_B = squared_B + backprops.flatten(2).sum(2).square().sum(1)
    return squared_B


def per_sample_gradient(module: _Conv, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, C_out, C_in / groups, *kernel], "bias": [B, C_out]}, trainable ones only."""
    gradients = {}
    if module.weight.requires_grad:
        a_BhPd, g_BhPp = patches(module, activations), by_group(module, backprops)
        whole = g_BhPp.transpose(2, 3) @ a_BhPd
        gradients["weight"] = whole.reshape(len(backprops), *_weight_shape(module))
    if module.bias is not None and module.bias.requires_grad:
        gradients["bias"] = backprops.flatten(2).sum(2)
    return gradients


def weighted_gradient(module: _Conv, activations: Tensor, backprops: Tensor, weights_B: Tensor) -> dict[str, Tensor]:
    """{"weight": [C_out, C_in / groups, *kernel], "bias": [C_out]}, trainable ones only; no patches are cut."""
    g = _terms.scaled(backprops, weights_B)
    gradients = {}
    if module.weight.requires_grad:
        contract: Callable[..., Tensor] = (conv1d_weight, conv2d_weight, conv3d_weight)[len(module.kernel_size) - 1]
        x = padded(module, activations)
        shape = _weight_shape(module)
        options = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
        gradients["weight"] = contract(x, shape, g, **options) if len(x) else g.new_zeros(shape)
    if module.bias is not None and module.bias.requires_grad:
        gradients["bias"] = g.flatten(2).sum((0, 2))
    return gradients


def patches(module: _Conv, x: Tensor) -> Tensor:
    """[B, groups, P, (C_in / groups) k]: what each position of the output sees of ``x`` [B, C_in, ...]."""
    x = padded(module, x)
    sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (kernel, stride, dilation) in enumerate(sizes, start=2):
        x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    directions = len(module.kernel_size)
    places, window = x.shape[2 : 2 + directions], x.shape[2 + directions :]
    x = x.reshape(x.shape[0], module.groups, x.shape[1] // module.groups, places.numel(), window.numel())
    return x.transpose(2, 3).flatten(3)


def by_group(module: _Conv, g: Tensor) -> Tensor:
    """[B, groups, P, C_out / groups] from [B, C_out, ...]."""
    split = g.reshape(g.shape[0], module.groups, g.shape[1] // module.groups, g.shape[2:].numel())
    return split.transpose(2, 3)


def padded(module: _Conv, x: Tensor) -> Tensor:
    """``x`` with the layer's padding around it."""
    if x.dim() != len(module.kernel_size) + 2:
        wanted = f"[B, C, {len(module.kernel_size)} directions]"
        raise ValueError(
            f"{type(module).__name__} got an input of shape {tuple(x.shape)}, wanted {wanted}: add a batch"
        )
    around = [amount for both in reversed(_padding(module)) for amount in both]
    if not any(around):
        return x
    return F.pad(x, around, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _padding(module: _Conv) -> list[tuple[int, int]]:
    """(before, after) of every direction; "same" puts the odd one after."""
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(amount), int(amount)) for amount in module.padding]


def _weight_shape(module: _Conv) -> tuple[int, ...]:
    """The weight's shape, from the options: while its unit is freed the weight itself is empty."""
    return (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
