"""Suspicions about how a layer's squared norm is formed from its activations and backprops.

Legend: n samples, T positions, d and p input and output features, V rows of an embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdpcheck import arithmetic, layouts, models
from fsdpcheck.case import Case
from fsdpcheck.diagnosis.fitting import mentions
from fsdpcheck.oracle import Answer
from fsdpcheck.suspects import Suspect

_SUBSETS = 4  # layers of one kind of which every subset is tried: an implementation may choose a form by size


class _Seen(NamedTuple):
    """One layer in one forward of all samples: its input and the gradient of its output, each sample's own."""

    name: str
    module: nn.Module
    trains: frozenset[str]
    activations: Tensor
    backprops: Tensor


def suspected(answer: Answer, step: int) -> Iterator[tuple[Suspect, Tensor]]:
    """(suspicion, what it adds to the squared norms [n])."""
    own = answer.case.model.own is not None  # whose layers may be called in any way
    if own or not answer.case.step.private or answer.case.model.tied is not None or not answer.steps[step].samples:
        return
    found: dict[str, tuple[str, dict[str, Tensor]]] = {}
    for layer in _layers(answer.case, answer, step):
        for key, text, delta in _deltas(layer):
            if bool(delta.any()):
                found.setdefault(key, (text, {}))[1][layer.name] = delta
    for key, (text, deltas) in found.items():
        for names in _chosen(list(deltas)):
            delta = torch.stack([deltas[name] for name in names]).sum(0)
            yield Suspect(key, f"{text} ({mentions(names)})"), delta


def _chosen(names: list[str]) -> Iterator[list[str]]:
    """All layers; and where they are few, every other choice of some."""
    yield names
    for count in range(len(names) - 1, 0, -1) if len(names) <= _SUBSETS else ():
        yield from map(list, itertools.combinations(names, count))


def _layers(case: Case, answer: Answer, step: int) -> list[_Seen]:
    """Every layer of the body with its activations and backprops, float64."""
    wanted, model = answer.steps[step], models.build(case).double()
    trains = {name: frozenset(n for n, p in m.named_parameters(recurse=False) if p.requires_grad)
              for name, m in model.named_modules()}  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(wanted.before[name])
            parameter.requires_grad_()
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    for name, module in model.named_modules():
        if name != "instrument" and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda m, i, o, name=name: seen.append((name, m, i[0].detach(), o)))
    inputs = layouts.inputs(case)[list(wanted.samples)]
    body = layouts.targets(case)[list(wanted.samples)].double()
    packed = torch.cat([body, torch.zeros_like(wanted.targets)], dim=1)
    with arithmetic.of(case):
        losses = models.loss_for(case)(model(inputs.double() if inputs.is_floating_point() else inputs), packed)
        outputs = [output for *_, output in seen]
        backprops = torch.autograd.grad(losses.sum(), outputs, allow_unused=True, materialize_grads=True)
    return [_Seen(name, m, trains[name], a, g) for (name, m, a, _), g in zip(seen, backprops, strict=True)]


def _deltas(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    """(key, text, what is added to the squared norms [n]) of one layer."""
    if isinstance(layer.module, nn.Linear):
        yield from _linear(layer)
    elif isinstance(layer.module, nn.Embedding | nn.EmbeddingBag):
        yield from _embedding(layer)
    if isinstance(layer.module, nn.Linear | nn.LayerNorm) and "bias" in layer.trains:
        yield from _bias(layer)


def _linear(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    a_nTd, g_nTp = _sequence(layer.activations), _sequence(layer.backprops)
    right = _square(g_nTp.transpose(1, 2) @ a_nTd)
    if "weight" in layer.trains:
        diagonal = (a_nTd.square().sum(2) * g_nTp.square().sum(2)).sum(1)
        text = "squared norms of positions are added up without their cross terms"
        yield "linear weight: no cross terms", text, diagonal - right
        half = a_nTd.shape[1] // 2
        pieces = [_square(g.transpose(1, 2) @ a) for a, g in ((a_nTd[:, :half], g_nTp[:, :half]),
                                                             (a_nTd[:, half:], g_nTp[:, half:]))]  # fmt: skip
        text = "the two halves of a sequence are squared apart, before they are added up"
        yield "linear weight: halves", text, pieces[0] + pieces[1] - right
    elif layer.trains:
        yield "linear: frozen weight", "a frozen weight counts in the norm, beside its trainable bias", right
    if "bias" not in layer.trains and "weight" in layer.trains and layer.module.bias is not None:
        yield "linear: frozen bias", "a frozen bias counts in the norm", g_nTp.sum(1).square().sum(1)


def _bias(layer: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    g_nTp, kind = _sequence(layer.backprops), type(layer.module).__name__
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
    tokens_nT, g = layer.activations.flatten(1), layer.backprops
    g_nTp = g.unsqueeze(1).expand(-1, tokens_nT.shape[1], -1) if g.dim() == 2 else _sequence(g)
    pads = tokens_nT == (-1 if module.padding_idx is None else module.padding_idx)
    hot_nTV = nn.functional.one_hot(tokens_nT, module.num_embeddings).double()
    rows_nVp = hot_nTV.transpose(1, 2) @ g_nTp
    real = g_nTp * ~pads.unsqueeze(2)
    right = _square(hot_nTV.transpose(1, 2) @ real)
    yield "embedding: rows not merged", "a token that occurs twice in a sample counts as two rows: no cross term", \
        real.square().sum((1, 2)) - right  # fmt: skip
    yield "embedding: padding row", "the row of padding_idx, which has no gradient, counts in the norm", \
        _square(rows_nVp) - right  # fmt: skip


def _square(x: Tensor) -> Tensor:
    return x.square().sum((1, 2))


def _sequence(x: Tensor) -> Tensor:
    """[n, T, f] from [n, f] (T = 1) or from [n, ..., f]."""
    return x.reshape(len(x), x.shape[1:-1].numel(), x.shape[-1])
