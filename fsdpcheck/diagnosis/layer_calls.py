"""Layers as a forward and backward of all samples on a single device sees them: what each was given, and its gradients.

Legend: n samples, T positions, V rows of an embedding, p features.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdpcheck.oracle import Answer
from fsdpcheck.workload import batches, models, numerics
from fsdpcheck.workload.layers import SelfAttention


class Seen(NamedTuple):
    """One layer in one forward of all samples: its input and the gradient of its output, each sample's own."""

    name: str
    module: nn.Module
    trains: frozenset[str]
    activations: Tensor
    backprops: Tensor
    shared: bool
    """Whether another layer uses the same weight."""


def layers_of(answer: Answer, step: int) -> list[Seen]:
    """Every layer of the body with its activations and backprops, float64, that is called on as many rows as samples.

    What one row for all samples adds to the norm of each is not read off that row.
    """
    case, wanted = answer.case, answer.steps[step]
    model = models.wide(case)
    trains = {name: frozenset(n for n, p in m.named_parameters(recurse=_whole(m)) if p.requires_grad)
              for name, m in model.named_modules()}  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(wanted.before[name])
            parameter.requires_grad_()
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    for name, module in model.named_modules():
        if name != "instrument" and any(True for _ in module.parameters(recurse=_whole(module))):
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
        Seen(name, m, trains[name], a, g, uses[id(getattr(m, "weight", None))] > 1)
        for (name, m, a, _), g in zip(seen, backprops, strict=True)
        if len(a) == len(wanted.samples)
    ]


def _whole(module: nn.Module) -> bool:
    """Whether a layer is looked at with what it holds: one that calls an nn.MultiheadAttention, which gives several."""
    return isinstance(module, SelfAttention)


def _note(
    seen: list[tuple[str, nn.Module, Tensor, Tensor]], name: str, module: nn.Module, given: Any, out: Any
) -> None:
    """What one layer takes and gives; no rule is known of one that gives several, as nn.MultiheadAttention does."""
    if isinstance(out, Tensor):
        seen.append((name, module, given[0].detach(), out))


def by_weight(layers: list[Seen]) -> list[list[Seen]]:
    """The uses of each weight that has several, of linear layers and embeddings."""
    found: dict[int, list[Seen]] = {}
    for layer in layers:
        if layer.shared and "weight" in layer.trains and isinstance(layer.module, nn.Linear | nn.Embedding):
            found.setdefault(id(layer.module.weight), []).append(layer)
    return [*found.values()]


def gradient_of_use(layer: Seen, padded: bool) -> Tensor:
    """Gradient [n, rows, columns] of a tied weight through one of its uses; ``padded``: with padding_idx's row."""
    if isinstance(layer.module, nn.Linear):
        return sequence(layer.backprops).transpose(1, 2) @ sequence(layer.activations)
    module: Any = layer.module
    hot_nTV = nn.functional.one_hot(layer.activations.flatten(1), module.num_embeddings).double()
    return hot_nTV.transpose(1, 2) @ by_position(layer)[padded]


def by_position(layer: Seen) -> tuple[Tensor, Tensor]:
    """What each token adds to its row, [n, T, p]: without those of padding_idx, and with them."""
    module: Any = layer.module
    tokens_nT, g = layer.activations.flatten(1), layer.backprops
    g_nTp = g.unsqueeze(1).expand(-1, tokens_nT.shape[1], -1) if g.dim() == 2 else sequence(g)
    used_nT = used_tokens(layer)
    if averages(module):
        g_nTp = g_nTp / used_nT.sum(1).clamp(min=1)[:, None, None]
    return g_nTp * used_nT.unsqueeze(2), g_nTp


def averages(module: nn.Module) -> bool:
    return isinstance(module, nn.EmbeddingBag) and module.mode == "mean"


def used_tokens(layer: Seen) -> Tensor:
    """[n, T]: which tokens are not padding."""
    module: Any = layer.module
    padding: int = -1 if module.padding_idx is None else module.padding_idx
    return layer.activations.flatten(1) != padding


def sequence(x: Tensor) -> Tensor:
    """[n, T, f] from [n, f] (T = 1) or from [n, ..., f]."""
    return x.reshape(len(x), x.shape[1:-1].numel(), x.shape[-1])
