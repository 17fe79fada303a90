"""Causes of a wrong squared norm of a layer, in how it is formed from activations and backprops.

Legend: n samples, T positions, d and p input and output features, V rows of an embedding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import layer_norm_rules
from fsdpcheck.diagnosis.cause_fit import mentions
from fsdpcheck.findings.cause import EXACT, WEAK, Cause
from fsdpcheck.oracle import Answer
from fsdpcheck.workload import batches, models, numerics

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CROSS = ("weight: no cross terms", "tied: no cross term")
"""Where each use of a weight has one position, these two are one."""
_PADDING_ROW = ("embedding: padding row", "the row of padding_idx, which has no gradient, counts in the norm")
_SUBSETS = 4  # layers of one kind of which every subset is tried: an implementation may choose a form by size


class _Seen(NamedTuple):
    """One layer in one forward of all samples: its input and the gradient of its output, each sample's own."""

    name: str
    module: nn.Module
    trains: frozenset[str]
    activations: Tensor
    backprops: Tensor
    shared: bool
    """Whether another layer uses the same weight."""


def candidates(answer: Answer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, what it adds to the squared norms [n])."""
    own = answer.case.model.own is not None  # whose layers may be called in any way
    if own or not answer.case.step.private or not answer.steps[step].samples:
        return
    found: dict[str, tuple[str, dict[str, Tensor]]] = {}
    layers = _layers(answer.case, answer, step)
    with numerics.of(answer.case):
        told = [(layer.name, *each) for layer in layers for each in _deltas(layer)]
        for uses in _of_one_weight(layers):
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


def _layers(case: TrainingCase, answer: Answer, step: int) -> list[_Seen]:
    """Every layer of the body with its activations and backprops, float64, that is called on as many rows as samples.

    What one row for all samples adds to the norm of each is not read off that row.
    """
    wanted, model = answer.steps[step], models.wide(case)
    trains = {name: frozenset(n for n, p in m.named_parameters(recurse=False) if p.requires_grad)
              for name, m in model.named_modules()}  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(wanted.before[name])
            parameter.requires_grad_()
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    for name, module in model.named_modules():
        if name != "instrument" and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(partial(_note, seen, name))
    inputs = batches.inputs(case)[list(wanted.samples)]
    body = batches.targets(case)[list(wanted.samples)].double()
    packed = torch.cat([body, torch.zeros_like(wanted.targets)], dim=1)
    with numerics.of(case):
        losses = models.loss_for(case)(model(inputs.double() if inputs.is_floating_point() else inputs), packed)
        outputs = [output for *_, output in seen]
        if not outputs:
            return []
        backprops = torch.autograd.grad(losses.sum(), outputs, allow_unused=True, materialize_grads=True)
    uses = Counter(id(getattr(module, "weight", None)) for _, module, *_ in seen)
    return [
        _Seen(name, m, trains[name], a, g, uses[id(getattr(m, "weight", None))] > 1)
        for (name, m, a, _), g in zip(seen, backprops, strict=True)
        if len(a) == len(wanted.samples)
    ]


def _note(
    seen: list[tuple[str, nn.Module, Tensor, Tensor]], name: str, module: nn.Module, given: Any, out: Any
) -> None:
    """What one layer takes and gives; no rule is known of one that gives several, as nn.MultiheadAttention does."""
    if isinstance(out, Tensor):
        seen.append((name, module, given[0].detach(), out))


def _deltas(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
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
    if "bias" in layer.trains:
        yield from _bias(layer)


def _linear(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    a_nTd, g_nTp = _sequence(layer.activations), _sequence(layer.backprops)
    if "weight" in layer.trains:
        if not layer.shared:
            yield from layer_norm_rules.of_products(a_nTd, g_nTp)
    elif layer.trains:
        right = _square(g_nTp.transpose(1, 2) @ a_nTd)
        yield "linear: frozen weight", "a frozen weight counts in the norm, beside its trainable bias", right
    if "bias" not in layer.trains and "weight" in layer.trains and layer.module.bias is not None:
        yield "linear: frozen bias", "a frozen bias counts in the norm", g_nTp.sum(1).square().sum(1)


def _bias(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    g, kind = layer.backprops, type(layer.module).__name__
    channels = isinstance(layer.module, (*_CONVOLUTIONS, nn.GroupNorm))
    g_nTp = layer_norm_rules.channels_last(g) if channels else _sequence(g)
    right = g_nTp.sum(1).square().sum(1)
    yield f"{kind} bias: positions apart", f"the bias of {kind}: squares of positions are added up without their " \
        "cross terms", g_nTp.square().sum((1, 2)) - right  # fmt: skip
    gram = _square(g_nTp @ g_nTp.transpose(1, 2))
    text = f"the bias of {kind}: entries of the Gram matrix are squared before they are added up"
    yield f"{kind} bias: Gram entries squared", text, gram - right


def _embedding(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    module: Any = layer.module
    if "weight" not in layer.trains:
        return
    real_nTp, padded_nTp = _by_position(layer)
    hot_nTV = nn.functional.one_hot(layer.activations.flatten(1), module.num_embeddings).double()
    right = _square(hot_nTV.transpose(1, 2) @ real_nTp)
    where = "a bag" if isinstance(module, nn.EmbeddingBag) else "a sample"
    text = f"a token that occurs twice in {where} counts as two rows: no cross term"
    yield f"{type(module).__name__}: rows not merged", text, real_nTp.square().sum((1, 2)) - right
    if not layer.shared:
        yield *_PADDING_ROW, _square(hot_nTV.transpose(1, 2) @ padded_nTp) - right
    if _averages(module):
        used_n, length = _used_tokens(layer).sum(1), layer.activations.shape[1]
        text = "the mean of a bag divides by all of its tokens, those of padding_idx too"
        yield "EmbeddingBag: divisor", text, right * (used_n / length).square() - right


def _by_position(layer: _Seen) -> tuple[Tensor, Tensor]:
    """What each token adds to its row, [n, T, p]: without those of padding_idx, and with them."""
    module: Any = layer.module
    tokens_nT, g = layer.activations.flatten(1), layer.backprops
    g_nTp = g.unsqueeze(1).expand(-1, tokens_nT.shape[1], -1) if g.dim() == 2 else _sequence(g)
    used_nT = _used_tokens(layer)
    if _averages(module):
        g_nTp = g_nTp / used_nT.sum(1).clamp(min=1)[:, None, None]
    return g_nTp * used_nT.unsqueeze(2), g_nTp


def _averages(module: nn.Module) -> bool:
    return isinstance(module, nn.EmbeddingBag) and module.mode == "mean"


def _used_tokens(layer: _Seen) -> Tensor:
    """[n, T]: which tokens are not padding."""
    module: Any = layer.module
    padding: int = -1 if module.padding_idx is None else module.padding_idx
    return layer.activations.flatten(1) != padding


def _of_one_weight(layers: list[_Seen]) -> list[list[_Seen]]:
    """The uses of each weight that has several, of linear layers and embeddings."""
    found: dict[int, list[_Seen]] = {}
    for layer in layers:
        if layer.shared and "weight" in layer.trains and isinstance(layer.module, nn.Linear | nn.Embedding):
            found.setdefault(id(layer.module.weight), []).append(layer)
    return [*found.values()]


def _of_uses(shared: list[_Seen]) -> Iterator[tuple[str, str, Tensor]]:
    """What mistakes add for a weight of several uses, whose gradient is the sum of theirs."""
    linear = [layer for layer in shared if isinstance(layer.module, nn.Linear)]
    if linear:
        ends = [torch.cat([_sequence(x) for x in own], 1)
                for own in zip(*((layer.activations, layer.backprops) for layer in linear), strict=True)]  # fmt: skip
        yield next(
            layer_norm_rules.of_products(ends[0], ends[1])
        )  # halves of the uses of one weight are the uses apart
    if len(shared) > 1:
        uses = [_of_use(layer, padded=False) for layer in shared]
        right = _square(torch.stack(uses).sum(0))
        text = "the uses of a tied (shared) weight are measured apart: the cross term of their sum is missing"
        yield "tied: no cross term", text, torch.stack([_square(use) for use in uses]).sum(0) - right
        for key, use in (("first", uses[0]), ("last", uses[-1])):
            text = f"of the uses of a tied (shared) weight the {key} alone is measured"
            yield f"tied: {key} use", text, _square(use) - right
        padded = torch.stack([_of_use(layer, padded=True) for layer in shared]).sum(0)
        yield *_PADDING_ROW, _square(padded) - right


def _of_use(layer: _Seen, padded: bool) -> Tensor:
    """Gradient [n, rows, columns] of a tied weight through one of its uses; ``padded``: with padding_idx's row."""
    if isinstance(layer.module, nn.Linear):
        return _sequence(layer.backprops).transpose(1, 2) @ _sequence(layer.activations)
    module: Any = layer.module
    hot_nTV = nn.functional.one_hot(layer.activations.flatten(1), module.num_embeddings).double()
    return hot_nTV.transpose(1, 2) @ _by_position(layer)[padded]


def _square(x: Tensor) -> Tensor:
    return x.square().sum((1, 2))


def _sequence(x: Tensor) -> Tensor:
    """[n, T, f] from [n, f] (T = 1) or from [n, ..., f]."""
    return x.reshape(len(x), x.shape[1:-1].numel(), x.shape[-1])
