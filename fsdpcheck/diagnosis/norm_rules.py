"""Causes of a wrong squared norm of a layer, in how it is formed from activations and backprops.

Legend: n samples, T positions, d and p input and output features, V rows of an embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.diagnosis import attention_masks, layer_norm_rules
from fsdpcheck.diagnosis.cause_fit import mentions
from fsdpcheck.diagnosis.layer_calls import (
    Seen,
    averages,
    by_position,
    by_weight,
    gradient_of_use,
    layers_of,
    sequence,
    used_tokens,
)
from fsdpcheck.findings.cause import EXACT, WEAK, Cause
from fsdpcheck.oracle import Answer
from fsdpcheck.workload import numerics
from fsdpcheck.workload.layers import SelfAttention

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CROSS = ("weight: no cross terms", "tied: no cross term")
"""Where each use of a weight has one position, these two are one."""
_PADDING_ROW = ("embedding: padding row", "the row of padding_idx, which has no gradient, counts in the norm")
_SUBSETS = 4  # layers of one kind of which every subset is tried: an implementation may choose a form by size


def candidates(answer: Answer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, what it adds to the squared norms [n])."""
    own = answer.case.model.own is not None  # whose layers may be called in any way
    if own or not answer.case.step.private or not answer.steps[step].samples:
        return
    found: dict[str, tuple[str, dict[str, Tensor]]] = {}
    layers = layers_of(answer, step)
    with numerics.of(answer.case):
        told = [(layer.name, *each) for layer in layers for each in _deltas(layer)]
        for uses in by_weight(layers):
            several = " and ".join(dict.fromkeys(layer.name for layer in uses))
            told += [(several, *each) for each in _of_uses(uses)]
    for name, key, text, delta in told:
        if bool(delta.any()):
            found.setdefault(key, (text, {}))[1][name] = delta
    kind = {layer.name: type(layer.module).__name__ for layer in layers}
    one, other = (found.get(key, ("", {}))[1] for key in _CROSS)
    alike = any(name in one and torch.equal(one[name], delta) for name, delta in other.items())
    for key, (text, deltas) in found.items():
        for names in _chosen(list(deltas), kind):
            delta = torch.stack([deltas[name] for name in names]).sum(0)
            strength = WEAK if key in _CROSS and alike else EXACT
            yield Cause(key, f"{text} ({mentions(names)})", strength), delta


def _chosen(names: list[str], kind: Mapping[str, str]) -> Iterator[list[str]]:
    """All layers, those of each kind; and where they are few, every other choice of some."""
    yield names
    if len(names) <= _SUBSETS:
        for count in range(len(names) - 1, 0, -1):
            yield from map(list, itertools.combinations(names, count))
        return
    by_kind = [[name for name in names if kind.get(name) == one] for one in dict.fromkeys(kind.values())]
    yield from (own for own in by_kind if 0 < len(own) < len(names))


def _deltas(layer: Seen) -> Iterator[tuple[str, str, Tensor]]:
    """(key, text, what is added to the squared norms [n]) of one layer."""
    module = layer.module
    if isinstance(module, nn.Linear):
        yield from _linear(layer)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield from _embedding(layer)
    elif "weight" in layer.trains and isinstance(module, _CONVOLUTIONS):
        yield from layer_norm_rules.of_convolution(module, layer.activations, layer.backprops)
    elif "weight" in layer.trains and isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        yield from layer_norm_rules.of_norm_layer(module, layer.activations, layer.backprops)
    elif layer.trains and isinstance(module, SelfAttention):
        yield from attention_masks.left_out(layer, module)
    if "bias" in layer.trains:
        yield from _bias(layer)


def _linear(layer: Seen) -> Iterator[tuple[str, str, Tensor]]:
    a_nTd, g_nTp = sequence(layer.activations), sequence(layer.backprops)
    if "weight" in layer.trains:
        if not layer.shared:
            yield from layer_norm_rules.of_products(a_nTd, g_nTp)
    elif layer.trains:
        right = _square(g_nTp.transpose(1, 2) @ a_nTd)
        yield "linear: frozen weight", "a frozen weight counts in the norm, beside its trainable bias", right


def _bias(layer: Seen) -> Iterator[tuple[str, str, Tensor]]:
    g, kind = layer.backprops, type(layer.module).__name__
    channels = isinstance(layer.module, (*_CONVOLUTIONS, nn.GroupNorm))
    g_nTp = layer_norm_rules.channels_last(g) if channels else sequence(g)
    right = g_nTp.sum(1).square().sum(1)
    yield f"{kind} bias: positions apart", f"the bias of {kind}: squares of positions are added up without their " \
        "cross terms", g_nTp.square().sum((1, 2)) - right  # fmt: skip
    gram = _square(g_nTp @ g_nTp.transpose(1, 2))
    text = f"the bias of {kind}: entries of the Gram matrix are squared before they are added up"
    yield f"{kind} bias: Gram entries squared", text, gram - right


def _embedding(layer: Seen) -> Iterator[tuple[str, str, Tensor]]:
    module: Any = layer.module
    if "weight" not in layer.trains:
        return
    real_nTp, padded_nTp = by_position(layer)
    hot_nTV = nn.functional.one_hot(layer.activations.flatten(1), module.num_embeddings).double()
    right = _square(hot_nTV.transpose(1, 2) @ real_nTp)
    where = "a bag" if isinstance(module, nn.EmbeddingBag) else "a sample"
    text = f"a token that occurs twice in {where} counts as two rows: no cross term"
    yield f"{type(module).__name__}: rows not merged", text, real_nTp.square().sum((1, 2)) - right
    if not layer.shared:
        yield *_PADDING_ROW, _square(hot_nTV.transpose(1, 2) @ padded_nTp) - right
    if averages(module):
        used_n, length = used_tokens(layer).sum(1), layer.activations.shape[1]
        text = "the mean of a bag divides by all of its tokens, those of padding_idx too"
        yield "EmbeddingBag: divisor", text, right * (used_n / length).square() - right


def _of_uses(shared: list[Seen]) -> Iterator[tuple[str, str, Tensor]]:
    """What mistakes add for a weight of several uses, whose gradient is the sum of theirs."""
    linear = [layer for layer in shared if isinstance(layer.module, nn.Linear)]
    if linear:
        ends = [torch.cat([sequence(x) for x in own], 1)
                for own in zip(*((layer.activations, layer.backprops) for layer in linear), strict=True)]  # fmt: skip
        yield next(
            layer_norm_rules.of_products(ends[0], ends[1])
        )  # halves of the uses of one weight are the uses apart
    if len(shared) > 1:
        uses = [gradient_of_use(layer, padded=False) for layer in shared]
        right = _square(torch.stack(uses).sum(0))
        text = "the uses of a tied (shared) weight are measured apart: the cross term of their sum is missing"
        yield "tied: no cross term", text, torch.stack([_square(use) for use in uses]).sum(0) - right
        for key, use in (("first", uses[0]), ("last", uses[-1])):
            text = f"of the uses of a tied (shared) weight the {key} alone is measured"
            yield f"tied: {key} use", text, _square(use) - right
        padded = torch.stack([gradient_of_use(layer, padded=True) for layer in shared]).sum(0)
        yield *_PADDING_ROW, _square(padded) - right


def _square(x: Tensor) -> Tensor:
    return x.square().sum((1, 2))
