"""Recorder: captures activations and outputs in forward, turns backprops into squared-norm terms in a first backward.

The first backward asks autograd for gradients with respect to layer *outputs* only, so no weight gradient is formed and
no parameter's ``.grad`` is touched: nothing unclipped exists that could leak.

With bookkeeping there is no second backward: the recorder keeps activations and backprops, to be contracted with the
clip factors (``sharing.weighted_gradients``).

*Immediate*: each layer's term is computed inside the backward, when its backprop arrives. *Deferred*: after the whole
backward. Both add the same terms in the same order, so they agree bit for bit. Whatever the timing,

* layers whose rule needs parameters' values (``fallback``) form their per-sample gradients inside the backward, while
  their unit is gathered for it; if it is not, that is an error, the same on every rank;
* layers that share parameters with others, or run again, wait for the whole backward: they are one term
(impl/clipping/tied_parameters.py).

No hook ever gathers anything, so no rank can be made to issue a collective that others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import norms
from ..costs.profile import OFF, Off, Profile
from ..norms import fallback
from ..norms._products import Products
from . import independence, records, tied_parameters, use_coverage
from . import layers as covered
from .modes import Mode
from .norm_aggregation import Contribution, Terms
from .records import Layer, Record, Use
from .rules import Clipping

Squares = Mapping[tuple[int, Contribution], Tensor]


class Recorder:
    """Records every forward of ``layers`` that builds a graph, until ``squared_norm_terms`` uses the records up."""

    def __init__(self, layers: Sequence[Layer], clipping: Clipping, profile: Profile | Off = OFF) -> None:
        self.layers = list(layers)
        self.clipping, self.profile = clipping, profile
        self.records: list[Record] = []
        self.kept: list[Use] = []
        self._asked: set[str] = set()
        self._running_again = False
        self._ran: dict[int, nn.Parameter] = {}
        """Trainable parameters of layers that ran, recorded or without a graph."""
        self._first = {  # before the hooks that free a unit after its forward
            layer.name: layer.module.register_forward_hook(partial(self._record, layer), prepend=True, with_kwargs=True)
            for layer in layers
        }

    def squared_norm_terms(self, losses: Tensor, mode: Mode) -> Terms:
        """First backward: the terms [b] of this rank's squared per-sample gradient norms of ``losses`` [b].

        With two passes the graph stays for a second backward. With bookkeeping it goes, and activations and backprops
        stay for ``take``.
        """
        found, self.records = self.records, []
        ran, self._ran = list(self._ran.values()), {}
        self.kept = []
        self._refuse_unsound(found, losses)
        backward = self._deferred if mode.timing == "deferred" else self._immediate
        with use_coverage.refused_gradients(ran):
            squares = backward(found, losses, mode)
        self.profile.count("layers with norms", len(squares))
        with self.profile.part("stack"):
            return self._summed(squares, losses)

    def take(self) -> list[Use]:
        """What bookkeeping kept of the last first backward; it is the caller's now."""
        kept, self.kept = self.kept, []
        return kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around forwards that are not to be recorded, such as those that a backward recomputes."""
        before, self._running_again = self._running_again, True
        try:
            yield
        finally:
            self._running_again = before

    def forget(self) -> None:
        """Drop what a forward outside any step, or a step that raised, has left."""
        self.records, self.kept, self._ran = [], [], {}

    def _deferred(self, found: Sequence[Record], losses: Tensor, mode: Mode) -> list[Squares]:
        return self._backward(found, losses, mode, at_once=frozenset())

    def _immediate(self, found: Sequence[Record], losses: Tensor, mode: Mode) -> list[Squares]:
        alone = frozenset(group[0] for group in tied_parameters.groups(found) if len(group) == 1)
        return self._backward(found, losses, mode, at_once=alone)

    def _backward(self, found: Sequence[Record], losses: Tensor, mode: Mode, at_once: frozenset[int]) -> list[Squares]:
        """Squared norms of each group of records, in the order of the forward; ``at_once``: those not to put off."""
        held: dict[int, Use] = {}
        early: dict[int, Squares] = {}

        def arrived(position: int, backprop: Tensor) -> None:
            use = self._use(found[position], backprop.detach())
            if found[position].layer.needs_parameters:
                held[position] = use
            if position in at_once:
                early[position] = self._term([use], mode)

        awaited = [p for p, record in enumerate(found) if p in at_once or record.layer.needs_parameters]
        handles = [
            found[position].output.register_hook(partial(arrived, position))  # type: ignore[no-untyped-call]
            for position in awaited
        ]
        with self.paused():
            gradients = backprops(found, losses, mode)
        for handle in handles:
            handle.remove()
        arrivals = {p: held.get(p) or Use(found[p], g.detach()) for p, g in enumerate(gradients) if g is not None}
        if mode.passes == "bookkeeping":
            self.kept = list(arrivals.values())
        squares = []
        for group in tied_parameters.groups(found):
            present = [arrivals[position] for position in group if position in arrivals]
            if present:
                squares.append(early[group[0]] if group[0] in early else self._term(present, mode))
        return squares

    def _term(self, together: Sequence[Use], mode: Mode) -> Squares:
        with self.profile.part(f"norms of {together[0].record.layer.name}"):
            return term(together, mode, self.clipping.group_of)

    def _summed(self, squares: Sequence[Squares], losses: Tensor) -> Terms:
        """Terms added up by group and contribution, in the order of the forward: [b], or [G, b] with G groups.

        No partial sum if no layer contributes that way.
        """
        zero = torch.zeros_like(losses, requires_grad=False)
        sums: dict[tuple[int, Contribution], Tensor] = {}
        for found in squares:
            for key, term_B in found.items():
                sums[key] = sums[key] + term_B if key in sums else zero + term_B
        has_partial = any(layer.contribution == "partial" for layer in self.layers)
        complete = self._by_group(sums, "complete", zero)
        return Terms(complete, self._by_group(sums, "partial", zero) if has_partial else None)

    def _by_group(self, sums: Squares, contribution: Contribution, zero: Tensor) -> Tensor:
        if self.clipping.groups is None:
            return sums.get((0, contribution), zero)
        return torch.stack([sums.get((g, contribution), zero) for g in range(len(self.clipping.groups))])

    def _use(self, record: Record, backprop: Tensor) -> Use:
        """A use, and what takes parameters formed already, while they are gathered: products or gradients."""
        use = Use(record, backprop)
        if not record.layer.needs_parameters:
            return use
        with self.paused(), torch.no_grad():
            return use.without_parameters()

    def _record(
        self, layer: Layer, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        if self._running_again:
            return
        self._ran.update((id(parameter), parameter) for parameter in layer.parameters())
        if not torch.is_grad_enabled():
            return
        covered.refuse_now(layer)
        record = records.record_of(layer, inputs, keywords, output)
        if layer.needs_parameters and layer.name not in self._asked:
            self._asked.add(layer.name)
            assert not isinstance(record.activations, Products)  # made in the backward
            if fallback.mixes_samples(module, record.activations):
                kind = norms.layer_type(module).__name__
                raise NotImplementedError(
                    f"{layer.name} is a {kind}: it mixes the samples of a batch; {independence.INSTEAD}"
                )
        self.records.append(record)

    def _refuse_unsound(self, found: Sequence[Record], losses: Tensor) -> None:
        """Raise, naming the layer, where records would not give the norms of these losses."""
        for record in found:
            name, rows = record.layer.name, len(record.output)
            if record.output._version != record.version:
                raise RuntimeError(
                    f"the output of {name} was changed in place: its gradient is lost; let what follows it make a new"
                    " tensor (inplace=False)"
                )
            if record.input_changed:
                raise RuntimeError(
                    f"an input of {name} was changed in place after its forward: its norm would be that of others;"
                    " let what changes it make a new tensor"
                )
            if next(iter(record.layer.module._forward_hooks)) != self._first[name].id:
                raise RuntimeError(
                    f"a forward hook was put before all others of {name} (prepend=True): it may change what norms take"
                    " for the layer's output; register it without prepend, or before the trainer is made"
                )
            if rows != len(losses):
                independence.refuse_rows(name, rows, len(losses))
        if losses.dtype in records.HALF:
            raise TypeError(
                f"got losses in {losses.dtype}: clip factors would be rounded to it, and factor times norm exceed C;"
                " compute the loss from outputs cast to float32"
            )
        use_coverage.refuse_hooks(found)
        if self.layers:
            use_coverage.refuse_unrecorded(self.layers[0].model, found, losses)


def backprops(found: Sequence[Record], losses: Tensor, mode: Mode) -> Sequence[Tensor | None]:
    """Gradients of sum(losses) with respect to each recorded output; None where the loss does not depend on it.

    Raises NotImplementedError if the loss depends on a further output of a layer, whose gradient no rule knows.
    """
    if not found or not losses.requires_grad:
        return [None] * len(found)
    others = [(record, tensor) for record in found for tensor in record.others]
    outputs = [record.output for record in found] + [tensor for _, tensor in others]
    again = mode.passes == "two_pass"
    gradients = torch.autograd.grad(losses, outputs, torch.ones_like(losses), retain_graph=again, allow_unused=True)
    for (record, _), gradient in zip(others, gradients[len(found) :], strict=True):
        if gradient is not None:
            raise NotImplementedError(
                f"the loss depends on a further output of {record.layer.name}, after its first: norms know the gradient"
                " of the first alone; let the layer return what the loss needs first, or in one tensor"
            )
    return gradients[: len(found)]


def term(together: Sequence[Use], mode: Mode, group_of: Callable[[str], int]) -> Squares:
    """{(clipping group, contribution): [b]}: squared norms of layers that share parameters, mostly of one layer.

    Partial ones are of the elements that lie in this rank's shard.
    """
    layer = together[0].record.layer
    groups = {group_of(name) for name in layer.names.values()}
    with torch.no_grad():
        if len(together) > 1 or together[0].held is not None or layer.contribution != "complete" or len(groups) > 1:
            return tied_parameters.squared_terms(together, group_of)
        use, group = together[0], groups.pop()
        if mode.norms == "flash" and hasattr(layer.rule, "flash_squared_norm"):  # kernels add up in float32 themselves
            return {(group, "complete"): layer.rule.flash_squared_norm(layer.module, use.record.activations, use.raw)}
        return {(group, "complete"): layer.rule.squared_norm(layer.module, use.activations, use.backprop)}
