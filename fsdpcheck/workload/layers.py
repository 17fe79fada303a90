"""The modules of one layer of a case's model: ordinary layers of torch.nn, made on the meta device, without values.

Legend: n samples, T positions, d features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.case import Activation, LayerSpec, ModelSpec
from fsdpcheck.case.model import Mask
from fsdpcheck.case.shapes import HEADS, PROJECTIONS, Stage

EPS = 3.0
"""Of drawn norms: nobody's default, and large beside the variance of small integers, so that on the grid of surrogates,
which is coarse, another one gives other values."""
_SCORE_SCALE = 0.25
"""What attention multiplies its scores by: its square root is dyadic for every d, which 1/sqrt(d)'s is not."""


class Abs(nn.Module):
    """|x|, elementwise; the subgradient at 0 is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


_ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": partial(nn.LeakyReLU, 0.5),
    "hardtanh": partial(nn.Hardtanh, -4.0, 4.0),
    "abs": Abs,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softmax": partial(nn.Softmax, dim=-1),
}


def linear(columns: int, rows: int, bias: bool) -> nn.Linear:
    """An nn.Linear on the meta device whose initialisation is left out: it would take two thirds of making one."""
    made: nn.Linear = _Unfilled(columns, rows, bias=bias, device="meta")
    made.__class__ = nn.Linear
    return made


class _Unfilled(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: the values come from the case."""


class Attention(nn.Module):
    """Self-attention of one head: output(softmax(query(x) key(x)^T / 4) value(x)) of [n, T, d]; n may be 0."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        for name in PROJECTIONS:
            self.add_module(name, linear(width, width, bias))

    def forward(self, x_nTd: Tensor) -> Tensor:
        query, key, value, output = (self.get_submodule(name) for name in PROJECTIONS)
        mixed_nTd = F.scaled_dot_product_attention(query(x_nTd), key(x_nTd), value(x_nTd), scale=_SCORE_SCALE)
        result: Tensor = output(mixed_nTd)
        return result


class SelfAttention(nn.Module):
    """An nn.MultiheadAttention of [n, T, d] with itself, masked as LayerSpec.mask says.

    n may be 0, for which torch raises with a key_padding_mask: then none is given, and changes nothing.
    """

    def __init__(self, width: int, heads: int, bias: bool, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.add_module(HEADS, nn.MultiheadAttention(width, heads, bias=bias, batch_first=True, device="meta"))

    def forward(self, x_nTd: Tensor) -> Tensor:
        masks: dict[str, Any] = {}
        if self.mask in ("causal", "both"):
            masks |= {"attn_mask": x_nTd.new_ones(x_nTd.shape[1], x_nTd.shape[1]).triu(1).bool(), "is_causal": True}
        if self.mask in ("keys", "both") and len(x_nTd):
            left_out = x_nTd.detach()[..., 0] < 0
            masks["key_padding_mask"] = left_out & (torch.arange(x_nTd.shape[1], device=x_nTd.device) > 0)
        result: Tensor = self.get_submodule(HEADS)(x_nTd, x_nTd, x_nTd, need_weights=False, **masks)[0]
        return result


def module(model: ModelSpec, stage: Stage) -> nn.Module:
    """The module of a stage, with parameters on the meta device."""
    if stage.kind == "embedding":
        return nn.Embedding(model.vocabulary, model.features, padding_idx=model.padding_idx, device="meta")
    if stage.kind == "embedding_bag":
        padding = model.padding_idx
        return nn.EmbeddingBag(model.vocabulary, model.features, mode=model.bags, padding_idx=padding, device="meta")
    if stage.spec is None:
        return nn.LayerNorm(model.features, eps=0.0, device="meta")
    return _layer(stage, stage.spec)


def activation(kind: Activation) -> nn.Module:
    """The module of an activation; "softmax" is over the last dim."""
    return _ACTIVATIONS[kind]()


def _layer(stage: Stage, spec: LayerSpec) -> nn.Module:
    if spec.kind == "conv":
        return _convolution(stage, spec)
    if spec.kind == "group_norm":
        return nn.GroupNorm(spec.groups, spec.width, eps=EPS, device="meta")
    if spec.kind == "layer_norm":
        return nn.LayerNorm(spec.width, eps=EPS, bias=spec.bias, device="meta")
    if spec.kind == "rms_norm":
        return nn.RMSNorm(spec.width, eps=EPS, device="meta")
    if spec.kind == "attention":
        if spec.heads:
            return SelfAttention(spec.width, spec.heads, spec.bias, spec.mask)
        return Attention(spec.width, spec.bias)
    return linear(stage.entering[-1], spec.width, spec.bias)


def _warn_of_odd_padding() -> None:
    """torch warns once a process, of the first padding="same" with an odd total: of this one, and not amid a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.conv1d(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), padding="same")


_warn_of_odd_padding()


def _convolution(stage: Stage, spec: LayerSpec) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(stage.entering) - 2]
    padding: Any = "same" if spec.same else spec.padding
    return kind(
        stage.entering[0], spec.width, spec.kernel, spec.stride, padding, spec.dilation, spec.groups, spec.bias,
        spec.padding_mode, device="meta",
    )  # fmt: skip
