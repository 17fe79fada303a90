"""Tied parameters, used several times in one forward: the norm of the sum of their uses' gradients.

A sample's gradient of such a parameter is the sum over its uses, and its squared norm has cross terms. Records are
therefore grouped by the parameters they share, not by layer: a layer whose weight is tied and whose bias is its own
counts each of them rightly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..norms import _tied_weights, embedding, linear
from .norm_aggregation import Contribution
from .records import Record, Use

GroupOf = Callable[[str], int]
"""The number of a parameter's clipping group, by canonical name; always 0 where one factor holds for all."""
Place = tuple[Use, str]
"""A use of a parameter: the use of its layer, and the attribute that holds it there."""


def groups(records: Sequence[Record]) -> list[list[int]]:
    """Positions of records, those that share a parameter, be it through others, together; in order of the forward."""
    group_of: list[list[int]] = []
    holder: dict[str, list[int]] = {}
    for position, record in enumerate(records):
        joined = [position]
        for name in record.layer.names.values():
            other = holder.get(name)
            if other is not None and other is not joined:
                joined = _merged(other, joined, holder, group_of)
        group_of.append(joined)
        holder.update(dict.fromkeys(record.layer.names.values(), joined))
    unique = {id(group): group for group in group_of}
    return sorted(sorted(group) for group in unique.values())


def places(uses: Sequence[Use]) -> dict[str, list[Place]]:
    """The uses of each trainable parameter, by canonical name."""
    found: dict[str, list[Place]] = {}
    for use in uses:
        for attribute, name in use.record.layer.names.items():
            found.setdefault(name, []).append((use, attribute))
    return found


def squared_terms(uses: Sequence[Use], group_of: GroupOf) -> dict[tuple[int, Contribution], Tensor]:
    """{(clipping group, contribution): [B]}: squared norms of the uses' parameters, of each the sum of its uses."""
    terms: dict[tuple[int, Contribution], Tensor] = {}
    for name, own in places(uses).items():
        use, attribute = own[0]
        contribution = use.record.layer.contributions[attribute]
        if contribution == "complete":
            squared = whole_squared_norm(own)
        else:
            part = use.record.layer.model.owned(name)
            squared = summed(own).unsqueeze(-1).flatten(1)[:, part].square().sum(1)
        key = group_of(name), contribution
        terms[key] = terms[key] + squared if key in terms else squared
    return terms


def whole_squared_norm(own: Sequence[Place]) -> Tensor:
    """[B]: || sum over uses ||^2 of one parameter, by the ghost forms where all uses have one."""
    rules = {use.record.layer.rule for use, _ in own}
    attributes = {attribute for _, attribute in own}
    if rules <= {linear, embedding} and attributes == {"weight"}:
        return _tied_weights.squared_norm([(use.record.layer.module, use.activations, use.backprop) for use, _ in own])
    if rules == {linear} and len(own) == 1:
        (use, _), *_ = own
        return linear.bias_squared_norm(linear.as_pair(use.backprop, use.backprop)[0])
    return summed(own).unsqueeze(-1).flatten(1).square().sum(1)


def summed(own: Sequence[Place]) -> Tensor:
    """[B, *shape]: the sum over uses of one parameter's per-sample gradients."""
    first, *more = [use.per_sample_gradient()[attribute] for use, attribute in own]
    for gradient in more:
        first = first + gradient
    return first


def weighted_gradients(
    uses: Sequence[Use], weights: Tensor, group_of: GroupOf, wanted: Collection[str]
) -> dict[str, Tensor]:
    """{canonical name: [*shape]}: sum_i weights_i g_i of the ``wanted`` parameters, over all of their uses.

    ``weights`` [B], or [G, B] with a row for each clipping group. Uses whose rules need parameters' values must have
    been held in the backward.
    """
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for use in uses:
            names = use.record.layer.names
            for group in dict.fromkeys(group_of(name) for name in names.values() if name in wanted):
                weights_B = weights if weights.dim() == 1 else weights[group]
                for attribute, gradient in _weighted(use, weights_B).items():
                    name = names[attribute]
                    if name in wanted and group_of(name) == group:
                        found[name] = found[name] + gradient if name in found else gradient
    return found


def _weighted(use: Use, weights_B: Tensor) -> Mapping[str, Tensor]:
    if use.held is not None:
        return {name: torch.tensordot(weights_B.to(g.dtype), g, dims=1) for name, g in use.held.items()}
    layer = use.record.layer
    found: dict[str, Tensor] = layer.rule.weighted_gradient(layer.module, use.activations, use.backprop, weights_B)
    return found


def _merged(one: list[int], other: list[int], holder: dict[str, list[int]], group_of: list[list[int]]) -> list[int]:
    """One list of both, in place of either wherever it stands."""
    one.extend(other)
    for name, group in holder.items():
        if group is other:
            holder[name] = one
    group_of[:] = [one if group is other else group for group in group_of]
    return one
