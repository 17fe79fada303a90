"""Planted bugs of the norm rules of further layers, of shared parameters, and of the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..norms import _terms, conv, embedding_bag, fallback
from ._fault import Function, Hit, fault


@fault(
    "norms._tied_weights:squared_norm",
    "tied uses' norms added, https://github.com/meta-pytorch/opacus/pull/738",
    "clipping.norms",
    cause=r"(tied|shared).* cross term",
)
def tied_cross_terms_left_out(original: Function, hit: Hit) -> Function:
    """Tied weights: the squared norms of the uses are added, without the cross term of their sum."""

    def planted(uses: Sequence[Any]) -> Any:
        if len(uses) > 1:
            hit()
        return torch.stack([original([use]) for use in uses]).sum(0)

    return planted


@fault(
    "norms._tied_weights:cross",
    "tied uses' norms added, https://github.com/meta-pytorch/opacus/pull/738",
    "clipping.norms",
    cause=r"(tied|shared).* cross term",
)
def embedding_and_head_without_cross_term(original: Function, hit: Hit) -> Function:
    """An Embedding tied to a Linear: the inner product of their two gradients is taken to be zero."""

    def planted(one: Any, other: Any) -> Any:
        hit()
        return torch.zeros_like(original(one, other))

    return planted


@fault("norms.conv:patches", "groups of a convolution mixed up", "clipping.norms", cause="groups of a convolution")
def convolution_groups_mixed(original: Function, hit: Hit) -> Function:
    """Convolutions: channels are dealt out to the groups in turn instead of in blocks."""

    def planted(module: Any, x: torch.Tensor) -> Any:
        if module.groups in (1, x.shape[1]):
            return original(module, x)
        hit()
        dealt = torch.arange(x.shape[1]).reshape(-1, module.groups).t().flatten()
        return original(module, x[:, dealt])

    return planted


@fault(
    "norms.conv:patches",
    "stride, padding or dilation forgotten in the unfold of a norm rule",
    "clipping.norms",
    cause="patches of a convolution",
)
def convolution_patches_shifted(original: Function, hit: Hit) -> Function:
    """Convolutions with padding: each position has the patch of the one before it, the first that of the last."""

    def planted(module: Any, x: torch.Tensor) -> Any:
        found = original(module, x)
        if conv.padded(module, x) is x:
            return found
        hit()
        return found.roll(1, 2)

    return planted


@fault(
    "norms.conv:padded",
    "padding_mode that a rule for convolutions does not read, as Opacus 1.6.0's",
    "clipping.norms",
    cause="padded with zeros",
)
def padding_mode_unread(original: Function, hit: Hit) -> Function:
    """Convolutions: the norm rule pads with zeros what the layer pads with numbers of its input."""

    def planted(module: Any, x: torch.Tensor) -> Any:
        if module.padding_mode == "zeros":
            return original(module, x)
        hit()
        (*ends,) = conv._padding(module)
        return F.pad(x, [amount for both in reversed(ends) for amount in both])

    return planted


@fault(
    "norms.multihead_attention:_mask",
    "a mask that is not read, https://github.com/pytorch/pytorch/issues/118025",
    "clipping.coefficients",
    cause="attention is run again without its mask",
)
def attention_run_again_without_masks(original: Function, hit: Hit) -> Function:
    """nn.MultiheadAttention: what lies between its projections is run again without its masks."""

    def planted(*given: Any) -> Any:
        if original(*given) is not None:
            hit()

    return planted


@fault(
    "norms.group_norm:normalised",
    "statistics of a GroupNorm over the wrong axes",
    "clipping.norms",
    cause="GroupNorm: .*all channels",
)
def group_norm_over_all_channels(original: Function, hit: Hit) -> Function:
    """GroupNorm: the norm rule takes the statistics over all channels at once, as one group."""

    def planted(module: Any, x: torch.Tensor) -> Any:
        if module.num_groups == 1 or not len(x):
            return original(module, x)
        hit()
        return F.group_norm(x, 1, eps=module.eps)

    return planted


@fault(
    "norms.rms_norm:normalised", "the input taken for the normalised input", "clipping.norms", cause="RMSNorm: .*input"
)
def rms_norm_of_raw_inputs(original: Function, hit: Hit) -> Function:
    """RMSNorm: the norm rule multiplies backprops with the input as it came."""

    def planted(module: Any, x: torch.Tensor) -> Any:
        hit()
        return x

    return planted


@fault(
    "norms.embedding_bag:squared_counts",
    "per-token norms added, cross terms lost, https://github.com/meta-pytorch/opacus/pull/738",
    "clipping.norms",
    cause="twice in a bag",
)
def bag_tokens_not_merged(original: Function, hit: Hit) -> Function:
    """EmbeddingBag: a token that occurs twice in a bag counts as two rows."""

    def planted(module: Any, tokens_BT: torch.Tensor) -> Any:
        hit()
        return embedding_bag.counted(module, tokens_BT).sum(1)

    return planted


class _Rule:
    """A rule of these names. Rules are told apart by identity, as modules are."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


@fault(
    "norms:rule_for",
    "a functorch fallback without vmap: the batch taken for a sample",
    "clipping.norms",
    cause="gradient of the whole micro-batch",
)
def fallback_sums_before_squaring(original: Function, hit: Hit) -> Function:
    """Every layer goes by the fallback, which gives each sample the gradient of the whole batch."""

    def per_sample_gradient(module: Any, activations: Any, backprops: torch.Tensor) -> Any:
        hit()
        whole = fallback.weighted_gradient(module, activations, backprops, backprops.new_ones(len(backprops)))
        return {name: value.expand(len(backprops), *value.shape) for name, value in whole.items()}

    def squared_norm(module: Any, activations: Any, backprops: torch.Tensor) -> Any:
        return _terms.squares(per_sample_gradient(module, activations, backprops), backprops)

    rule = _Rule(
        NEEDS_PARAMETERS=True,
        per_sample_gradient=per_sample_gradient,
        squared_norm=squared_norm,
        weighted_gradient=fallback.weighted_gradient,
    )
    return lambda module: rule
