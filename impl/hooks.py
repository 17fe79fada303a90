"""Recorder: captures activations and outputs in forward, turns backprops into squared-norm terms in a first backward.

The first backward asks autograd for gradients with respect to layer *outputs* only, so no weight gradient is formed and
no parameter's ``.grad`` is touched: nothing unclipped exists that could leak.

With bookkeeping there is no second backward: the recorder keeps activations and backprops, and ``weighted_gradients``
contracts them with the clip factors.

*Immediate*: each layer's term is computed inside the backward, when its backprop arrives. *Deferred*: after the whole
backward. Both add the same terms in the same order, so they agree bit for bit. Neither touches a parameter: a term
needs activations, backprops and flags only, so no rank can be made to gather anything inside a hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import norms
from .aggregate import Contribution, Terms
from .modes import Mode
from .sharded import Sharded


@dataclass(frozen=True)
class Layer:
    """A layer with trainable parameters, its norm rule, who shards it, and what this rank contributes.

    ``names``: the canonical name of each of its parameters, by attribute.
    """

    name: str
    module: nn.Module
    rule: ModuleType
    model: Sharded
    names: Mapping[str, str]
    contribution: Contribution


@dataclass(frozen=True)
class Record:
    """One layer in one forward: ``activations`` is its input, ``output`` still hangs on the graph."""

    layer: Layer
    activations: Tensor
    output: Tensor
    version: int


class Recorder:
    """Records every forward of ``layers`` that builds a graph, until ``squared_norm_terms`` uses the records up."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.records: list[Record] = []
        self.kept: list[tuple[Record, Tensor]] = []
        for layer in layers:
            layer.module.register_forward_hook(partial(self._record, layer))

    def squared_norm_terms(self, losses: Tensor, mode: Mode) -> Terms:
        """First backward: the terms [b] of this rank's squared per-sample gradient norms of ``losses`` [b].

        With two passes the graph stays for a second backward. With bookkeeping it goes, and activations and backprops
        stay for ``weighted_gradients``.
        """
        records, self.records = self.records, []
        self.kept = []
        for record in records:
            if record.output._version != record.version:
                raise RuntimeError(f"the output of {record.layer.name} was changed in place: its gradient is lost")
        backward = self._deferred if mode.timing == "deferred" else self._immediate
        return _sum_terms(records, backward(records, losses, mode), losses)

    def weighted_gradients(self, weights: Tensor) -> dict[str, Tensor]:
        """{canonical name: sum over samples of weight [b] times gradient}, from what bookkeeping kept; that is freed.

        Whole tensors of this rank's samples; a parameter that no loss depends on is missing.
        """
        kept, self.kept = self.kept, []
        total: dict[str, Tensor] = {}
        for record, backprop in kept:
            layer = record.layer
            gradients = layer.rule.weighted_gradient(layer.module, record.activations, backprop, weights)
            for attribute, gradient in gradients.items():
                name = layer.names[attribute]
                total[name] = total[name] + gradient if name in total else gradient
        return total

    def forget(self) -> None:
        """Drop what a forward outside any step, or a step that raised, has left."""
        self.records, self.kept = [], []

    def _keep(self, record: Record, backprop: Tensor, mode: Mode) -> None:
        if mode.passes == "bookkeeping":
            self.kept.append((record, backprop.detach()))

    def _deferred(self, records: Sequence[Record], losses: Tensor, mode: Mode) -> list[Tensor | None]:
        terms: list[Tensor | None] = []
        for record, gradient in zip(records, backprops(records, losses, mode), strict=True):
            if gradient is not None:
                self._keep(record, gradient, mode)
            terms.append(None if gradient is None else term(record, gradient))
        return terms

    def _immediate(self, records: Sequence[Record], losses: Tensor, mode: Mode) -> list[Tensor | None]:
        terms: list[Tensor | None] = [None] * len(records)

        def arrived(position: int, gradient: Tensor) -> None:
            self._keep(records[position], gradient, mode)
            terms[position] = term(records[position], gradient)

        handles = [
            record.output.register_hook(partial(arrived, position))  # type: ignore[no-untyped-call]
            for position, record in enumerate(records)
        ]
        backprops(records, losses, mode)
        for handle in handles:
            handle.remove()
        return terms

    def _record(self, layer: Layer, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if any(record.layer is layer for record in self.records):
            raise NotImplementedError(f"{layer.name} runs twice in one forward: its norm is that of a sum, not covered")
        self.records.append(Record(layer, inputs[0].detach(), output, output._version))


def backprops(records: Sequence[Record], losses: Tensor, mode: Mode) -> Sequence[Tensor | None]:
    """Gradients of sum(losses) with respect to each recorded output; None where the loss does not depend on it."""
    if not records or not losses.requires_grad:
        return [None] * len(records)
    outputs = [record.output for record in records]
    again = mode.passes == "two_pass"
    return torch.autograd.grad(losses, outputs, torch.ones_like(losses), retain_graph=again, allow_unused=True)


def term(record: Record, backprop: Tensor) -> Tensor:
    """[b]: the squared norm of this layer's per-sample gradients, or of the part of them this rank's shard owns."""
    layer = record.layer
    with torch.no_grad():
        if layer.contribution == "complete":
            squared: Tensor = layer.rule.squared_norm(layer.module, record.activations, backprop.detach())
            return squared
        gradients = layer.rule.per_sample_gradient(layer.module, record.activations, backprop.detach())
        return owned_squared_norm(layer, gradients, backprop)


def owned_squared_norm(layer: Layer, gradients: dict[str, Tensor], backprop: Tensor) -> Tensor:
    """[b]: squared sum over those elements of the per-sample gradients that lie in this rank's shard."""
    squared = backprop.new_zeros(len(backprop))
    for attribute, gradient in gradients.items():
        part = layer.model.owned(layer.names[attribute])
        squared = squared + gradient.flatten(1)[:, part].square().sum(1)
    return squared


def layers_of(model: Sharded, contribution: str) -> list[Layer]:
    """The layers whose norms make up a sample's norm, or an error that says why there is no right answer.

    ``contribution``: "complete", "partial", or "mixed" (inner units partial, the root's own parameters complete).
    """
    if tied := [uses[0].name for uses in model.places if len(uses) > 1]:
        raise NotImplementedError(f"tied parameters {tied}: private training needs the norm of the sum of uses")
    names: dict[int, dict[str, str]] = {}
    for uses in model.places:
        for slot in uses:
            names.setdefault(id(slot.module), {})[slot.attribute] = uses[0].name
    layers = []
    for name, module in model.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise NotImplementedError(f"{name} is a {type(module).__name__}: it mixes the samples of a batch")
        trainable = [name for name, value in module.named_parameters(recurse=False) if value.requires_grad]
        if trainable:
            own = names[id(module)]
            inner = not all(model.in_root(own[attribute]) for attribute in trainable)
            contributes: Contribution = (
                "partial" if contribution == "partial" or (contribution == "mixed" and inner) else "complete"
            )
            layers.append(Layer(name, module, _rule(name, module), model, own, contributes))
    return layers


def _rule(name: str, module: nn.Module) -> ModuleType:
    rule = norms.rule_for(module)
    if rule is None:
        known = ", ".join(sorted(layer.__name__ for layer in norms.rules()))
        kind = type(module).__name__
        raise NotImplementedError(f"{name} is a {kind} with trainable parameters, norm rules cover: {known}")
    if reason := getattr(rule, "refusal", lambda _: "")(module):
        raise NotImplementedError(f"{name}: {reason}")
    return rule


def _sum_terms(records: Sequence[Record], terms: Sequence[Tensor | None], losses: Tensor) -> Terms:
    """Terms added up by contribution, in the order of the forward; no partial sum if no layer contributes that way."""
    zero = torch.zeros_like(losses, requires_grad=False)
    complete, partial_sum = zero, zero
    for record, squared in zip(records, terms, strict=True):
        if record.layer.contribution == "complete":
            complete = complete + (zero if squared is None else squared)
        else:
            partial_sum = partial_sum + (zero if squared is None else squared)
    has_partial = any(record.layer.contribution == "partial" for record in records)
    return Terms(complete, partial_sum if has_partial else None)
