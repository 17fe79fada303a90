"""nn.MultiheadAttention, through its projections: it multiplies with their weights itself, so no inner layer ever runs.

Its projections of queries, keys and values and its output projection are four products, each a Linear (``_products``).
Their backprops are found by running again what lies between them, for the whole batch at once: that takes the values of
the parameters, while they are gathered, and forms no per-sample gradient. bias_k and bias_v are biases of one position.
An attention whose projections are layers of their own needs nothing of this.

Legend: B samples, T positions of queries, S of keys and values, e features, h heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import kernels
from . import fallback, linear
from ._products import Product, Products
from .fallback import Call

LAYER = nn.MultiheadAttention
NEEDS_PARAMETERS = True
COVERS_CHILDREN = True
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
PARAMETERS = (*_PROJECTIONS, "bias_k", "bias_v", "out_proj.weight", "out_proj.bias")
_ARGUMENTS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
"""Names of the arguments behind query, key and value, in order."""


def refusal(module: nn.MultiheadAttention) -> str:
    """Options under which rows of the input are not samples, or the layer is random."""
    if not module.batch_first:
        return "its first axis is positions, not samples: use batch_first=True"
    return fallback.refusal(module)


def call(positional: tuple[object, ...], keywords: dict[str, object]) -> Call:
    """The call with everything behind query, key and value named; ``attn_mask`` [T, S] is the same for all samples."""
    named = {**dict(zip(("query", "key", "value", *_ARGUMENTS), positional, strict=False)), **keywords}
    mask = named.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise NotImplementedError("a MultiheadAttention with a mask for each sample: give one [T, S] for all samples")
    return Call((), named, shared=("attn_mask",))


def squared_norm(module: nn.MultiheadAttention, activations: Call | Products, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over all trainable parameters."""
    return _products(module, activations, backprops).squared_norm(linear.weight_squared_norm)


def flash_squared_norm(module: nn.MultiheadAttention, activations: Call | Products, backprops: Tensor) -> Tensor:
    """[B]: the same, the matrices' by kernels."""
    return _products(module, activations, backprops).squared_norm(kernels.squared_norm)


def per_sample_gradient(
    module: nn.MultiheadAttention, activations: Call | Products, backprops: Tensor
) -> dict[str, Tensor]:
    """{dotted name: [B, *shape]} of all trainable parameters."""
    return _products(module, activations, backprops).per_sample_gradient()


def weighted_gradient(
    module: nn.MultiheadAttention, activations: Call | Products, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{dotted name: [*shape]} of all trainable parameters."""
    return _products(module, activations, backprops).weighted_gradient(weights_B)


def products(module: nn.MultiheadAttention, activations: Call, backprops: Tensor) -> Products:
    """The layer's products. Needs its parameters."""
    with activations.precision():
        return _as_called(module, activations, backprops)


def _as_called(module: nn.MultiheadAttention, activations: Call, backprops: Tensor) -> Products:
    trainable = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    inputs = [activations.keywords[name] for name in ("query", "key", "value")]
    projections = _projections(module)
    leaves = [F.linear(x, w, b).detach().requires_grad_() for x, (w, b, *_) in zip(inputs, projections, strict=True)]
    extra = [_rows_of(own, len(backprops)) for own in (module.bias_k, module.bias_v) if own is not None]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused kernels take exp of a rounded log
        mixed_BTe = _mixed(module, leaves, extra, activations)
        above = backprops @ module.out_proj.weight.detach()
        (*found,) = torch.autograd.grad(mixed_BTe, [*leaves, *extra], above)
    rows = [(name, bias, x, g) for x, (_, _, name, bias), g in zip(inputs, projections, found, strict=False)]
    rows += [("", name, None, g) for name, g in zip(("bias_k", "bias_v"), found[3:], strict=False)]
    rows += [("out_proj.weight", "out_proj.bias", mixed_BTe.detach(), backprops)]
    made = [Product(w if w in trainable else "", b if b in trainable else "", x, g) for w, b, x, g in rows]
    return Products(tuple(made), trainable)


def _products(module: nn.MultiheadAttention, activations: Call | Products, backprops: Tensor) -> Products:
    return activations if isinstance(activations, Products) else products(module, activations, backprops)


def _projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None, str, str]]:
    """(weight, bias, name of the parameter that holds the weight, of that with the bias) of queries, keys, values."""
    packed = module.in_proj_weight
    names = ("in_proj_weight",) * 3 if packed is not None else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    weights = packed.chunk(3) if packed is not None else [module.get_parameter(name) for name in names]
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
    return [(w.detach(), b, name, "in_proj_bias") for w, b, name in zip(weights, biases, names, strict=True)]


def _rows_of(own: Tensor, count: int) -> Tensor:
    """[B, 1, e]: bias_k or bias_v, a row for each sample, to find each sample's gradient."""
    return own.detach().expand(count, 1, own.shape[-1]).clone().requires_grad_()


def _mixed(module: nn.MultiheadAttention, projected: Sequence[Tensor], extra: Sequence[Tensor], given: Call) -> Tensor:
    """[B, T, e]: values, mixed by attention, before the output projection."""
    q_BTe, k_BSe, v_BSe = projected
    positions = k_BSe.shape[1]
    if extra:
        k_BSe, v_BSe = torch.cat([k_BSe, extra[0]], 1), torch.cat([v_BSe, extra[1]], 1)
    if module.add_zero_attn:
        k_BSe, v_BSe = F.pad(k_BSe, (0, 0, 0, 1)), F.pad(v_BSe, (0, 0, 0, 1))
    causal = _causal(given)
    mask = None if causal else _mask(given, q_BTe, k_BSe.shape[1] - positions)
    q, k, v = (x.view(*x.shape[:2], module.num_heads, module.head_dim).transpose(1, 2) for x in (q_BTe, k_BSe, v_BSe))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)


def _causal(given: Call) -> bool:
    """Whether the layer takes the causal mask and leaves ``attn_mask`` unread: what is only a hint may be untrue."""
    named = given.keywords
    hinted = bool(named.get("is_causal")) and not named.get("need_weights", True)
    return hinted and named.get("key_padding_mask") is None


def _mask(given: Call, like: Tensor, more: int) -> Tensor | None:
    """What is added to the scores, [B or 1, 1, T or 1, S + more], or None: masks of positions and of padding."""
    positions, padding = given.keywords.get("attn_mask"), given.keywords.get("key_padding_mask")
    masks = [] if positions is None else [positions[None, None]]
    masks += [] if padding is None else [padding[:, None, None]]
    added = [
        torch.zeros_like(m, dtype=like.dtype).masked_fill(m, -math.inf) if m.dtype == torch.bool else m.to(like.dtype)
        for m in masks
    ]
    return F.pad(sum(added[1:], added[0]), (0, more)) if added else None
