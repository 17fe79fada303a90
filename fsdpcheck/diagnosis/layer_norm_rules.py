"""Causes of a wrong norm of one kind of layer: sums of products, convolutions, layers that normalise.

Each gives what a known mistake adds to the squared gradient norms [n] of one layer's weight.

Legend: n samples, h groups of channels, T positions, d and p what a position sees and gives, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Told = Iterator[tuple[str, str, Tensor]]
"""(key, text, what is added to the squared norms [n])."""


def of_products(a_nTd: Tensor, g_nTp: Tensor) -> Told:
    """The weight's gradient is sum_t g_t a_t^T, by group of channels if [n, h, T, ...]."""
    right = _of(a_nTd, g_nTp)
    diagonal = (a_nTd.square().sum(-1) * g_nTp.square().sum(-1)).flatten(1).sum(1)
    text = "squared norms of positions are added up without their cross terms"
    yield "weight: no cross terms", text, diagonal - right
    half = a_nTd.shape[-2] // 2
    pieces = _of(a_nTd[..., :half, :], g_nTp[..., :half, :]) + _of(a_nTd[..., half:, :], g_nTp[..., half:, :])
    text = "the two halves of a sequence are squared apart, before they are added up"
    yield "weight: halves", text, pieces - right


def of_convolution(module: nn.Module, x: Tensor, g: Tensor) -> Told:
    """Inputs [n, C, ...] and backprops [n, C', ...] of one convolution whose weight is trained."""
    conv: Any = module
    g_nTp = channels_last(g)
    g_nhTp = g_nTp.reshape(*g_nTp.shape[:2], conv.groups, g.shape[1] // conv.groups).transpose(1, 2)
    ends = _padding(conv)
    both = _for_pad(ends)
    a_nhTd = _patches(conv, x, both, conv.padding_mode)
    right = _of(a_nhTd, g_nhTp)
    yield from of_products(a_nhTd, g_nhTp)
    if conv.groups not in (1, x.shape[1]):
        dealt = x.reshape(len(x), -1, conv.groups, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        text = "the groups of a convolution are mixed up: channels are dealt to them in turn, not in blocks"
        yield "convolution: groups", text, _of(_patches(conv, dealt, both, conv.padding_mode), g_nhTp) - right
    if conv.padding_mode != "zeros":
        text = f"the patches of a convolution are cut from an input padded with zeros, not {conv.padding_mode}"
        yield "convolution: zeros", text, _of(_patches(conv, x, both, "zeros"), g_nhTp) - right
    text = "the patches of a convolution are read a position too late"
    yield "convolution: late", text, _of(a_nhTd.roll(1, 2), g_nhTp) - right
    if any(before != behind for before, behind in ends):
        text = "the patches of a convolution are cut from an input whose odd element of padding stands at the wrong end"
        around = [(behind, before) for before, behind in ends]
        turned = _patches(conv, x, _for_pad(around), conv.padding_mode)
        yield "convolution: odd padding", text, _of(turned, g_nhTp) - right


def _padding(conv: Any) -> list[tuple[int, int]]:
    """(before, behind) of each direction; of an odd total for padding="same" the greater is behind, as torch has it."""
    if conv.padding == "valid":
        return [(0, 0)] * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [dilation * (kernel - 1) for kernel, dilation in zip(conv.kernel_size, conv.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(amount, amount) for amount in conv.padding]


def _for_pad(ends: list[tuple[int, int]]) -> list[int]:
    """As F.pad takes them: of the last direction first."""
    return [amount for pair in reversed(ends) for amount in pair]


def of_norm_layer(module: nn.Module, x: Tensor, g: Tensor) -> Told:
    """Inputs and backprops, [n, C, ...] of a GroupNorm, else [n, ..., d], of a layer whose weight is trained."""
    norm: Any = module
    kind = type(module).__name__
    if isinstance(module, nn.GroupNorm):
        xhat, last = _normalised(norm, x, norm.eps), channels_last
        if norm.num_groups > 1:
            whole = last(F.group_norm(x, 1, eps=norm.eps) * g).sum(1).square().sum(1)
            right = last(xhat * g).sum(1).square().sum(1)
            text = "GroupNorm: the norm rule takes the statistics over all channels at once, not group by group"
            yield "GroupNorm: all channels", text, whole - right
    else:
        xhat, last = _normalised(norm, x, norm.eps), _features_last
    right = last(xhat * g).sum(1).square().sum(1)
    text = f"{kind}: the norm rule takes the input as it came for the normalised input"
    yield f"{kind}: raw input", text, last(x * g).sum(1).square().sum(1) - right
    if norm.eps is not None:
        text = f"{kind}: the norm rule normalises with another eps than the layer's {norm.eps:g}"
        yield f"{kind}: eps", text, last(_normalised(norm, x, _USUAL_EPS) * g).sum(1).square().sum(1) - right


def channels_last(x: Tensor) -> Tensor:
    """[n, T, C] from [n, C, ...]; T = 1 where there are no positions."""
    return x.reshape(x.shape[0], x.shape[1], x.shape[2:].numel()).transpose(1, 2)


def _features_last(x: Tensor) -> Tensor:
    """[n, T, d] from [n, ..., d]; T = 1 where there are no positions."""
    return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])


_USUAL_EPS = 1e-5
"""The default of torch.nn.LayerNorm and GroupNorm. On a grid other small ones, and none, give what it does."""


def _normalised(norm: Any, x: Tensor, eps: float) -> Tensor:
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, eps=eps)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, norm.normalized_shape, None, eps)
    return F.layer_norm(x, norm.normalized_shape, None, None, eps)


def _of(a: Tensor, g: Tensor) -> Tensor:
    """[n]: squared norm of sum_t g_t a_t^T, over the groups of channels too."""
    return (g.transpose(-1, -2) @ a).square().flatten(1).sum(1)


def _patches(conv: Any, x: Tensor, around: list[int], mode: str) -> Tensor:
    """[n, h, T, (C / h) k]: what each position of the output sees of an input, padded as ``around`` says (F.pad)."""
    x = F.pad(x, around, mode="constant" if mode == "zeros" else mode)
    for axis, (kernel, stride, dilation) in enumerate(
        zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), start=2
    ):
        x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    directions = len(conv.kernel_size)
    places, window = x.shape[2 : 2 + directions].numel(), x.shape[2 + directions :].numel()
    x = x.reshape(x.shape[0], conv.groups, x.shape[1] // conv.groups, places, window)
    return x.transpose(2, 3).flatten(3)
