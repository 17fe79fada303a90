"""Metamorphic variants of a case: the answer must stay the same, or change in a way known beforehand.

A variant depends on the case alone, and on the implementation's features, so that it stays within what is accepted. A
case that has no such variant raises NotExact. It is counted as rejected, and nothing is claimed of it.

Legend: W ranks, S shards, R replicas, N the normaliser, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import BatchLayout, MeshSpec, ModelSpec, TrainingCase, Trait, UserModelSpec, prng
from fsdpcheck.case.shapes import item_units
from fsdpcheck.case.validation import is_power_of_two, whole_or_float
from fsdpcheck.errors import InvalidCase, NotApplicable, NotExact
from fsdpcheck.workload import batches, models

_LARGEST_WORLD = 6
_TO_GO_ON_AT = (1, 2, 3, 4, 5, 6, 8, 16)
"""Over how many ranks parameters may be sharded where a training goes on."""
_MOST_ROWS = 48
"""Of the instrument, where it has to fit two numbers of ranks."""

Pair = tuple[TrainingCase, TrainingCase]
_Piece = tuple[int, Literal["weight", "bias"]]
"""(layer, which of its parameters)."""


def listed(case: TrainingCase) -> TrainingCase:
    """The case with the samples of its first step written out, rank by rank, and used at every step."""
    if case.layout.kind == "by-replica":
        return case
    own = [[i for chunk in rank for i in chunk] for rank in batches.indices(case, 0)[:: case.mesh.model_ranks]]
    lists = tuple(tuple(rank) for rank in own)
    if case.layout.kind == "replicated":
        return replace(case, layout=BatchLayout("replicated", case.layout.batch_size, lists=lists[:1]))
    step = case.step if case.step.reduction == "sum" else replace(case.step, reduction="sum")
    return replace(case, layout=BatchLayout("listed", case.layout.batch_size, lists=lists), step=step)


def at_another_world_size(case: TrainingCase, features: Features) -> Pair:
    """The case, and the same logical batch on another number of ranks, or another split of them into replicas.

    Both release the same gradient: losses carry the factor W R (see models.loss_scale), so N grows with it.
    """
    first = _with_lists(case)
    return first, _chosen(case, features, _worlds(first), "number of ranks")


def for_resharding(case: TrainingCase, features: Features) -> Pair:
    """The same, with parameters of the same shapes: the instrument has as many rows on both numbers of ranks.

    The case comes first, unless it is one that ``many_write``: as many as 16 ranks read what was written, or write it.
    """
    first = _with_lists(case)
    second = _chosen(first, features, _to_go_on_at(first), "number of ranks and the same shapes")
    both = replace(first, mesh=replace(first.mesh, goes_on_at=second.world_size)), second
    return both[::-1] if many_write(case) else both


def many_write(case: TrainingCase) -> bool:
    """Whether a training goes on from what the largest mesh has written, which it has for each sixth seed."""
    return case.seed % 6 == 5


def with_other_units(case: TrainingCase, features: Features) -> Pair:
    """The case, and one whose layers are grouped into other sharding units: all in the root, or each its own."""
    if case.step.clip_groups == "units":
        raise NotExact("what is clipped together are the units, so others have another right answer")
    return case, _chosen(case, features, _groupings(case), "grouping into units")


def with_other_reshard(case: TrainingCase, features: Features) -> Pair:
    """The case, and one that keeps parameters unsharded after the forward where it frees them, or the reverse."""
    kept = replace(case.mesh, reshard_after_forward=not case.mesh.reshard_after_forward)
    return case, _chosen(case, features, [replace(case, mesh=kept)], "way to reshard")


def at_half_the_rate(case: TrainingCase) -> TrainingCase | None:
    """The case at half its learning rate, which trains the same parameters where losses are doubled; None where it
    does not: with weight decay or Adam the update is not linear in the gradients."""
    rule = case.step.optimizer
    if rule.kind != "sgd" or rule.weight_decay:
        return None
    return replace(case, step=replace(case.step, optimizer=replace(rule, lr_exponent=rule.lr_exponent + 1)))


def with_samples_reordered(case: TrainingCase, features: Features) -> Pair:
    """The case, and one in which every rank has its samples in the opposite order, or those of the next rank."""
    first = listed(case)
    lists = first.layout.lists
    orders = tuple(own[::-1] for own in lists), lists[1:] + lists[:1]
    cases = (replace(first, layout=replace(first.layout, lists=order)) for order in orders)
    return first, _chosen(first, features, cases, "order of samples")


def with_other_micro_batches(case: TrainingCase, features: Features) -> Pair:
    """The case, and one that takes each rank's samples in another number of micro-batches: one, or several."""
    counts = (1,) if case.step.micro_batches > 1 else (3, 2)
    if features.arithmetic.averaging == "before":  # both have the factors that the one with more reductions needs
        case = replace(case, arithmetic=replace(case.arithmetic, world_factors=max(*counts, case.step.reductions)))
    step = case.step if case.step.reduction == "sum" else replace(case.step, reduction="sum")
    cases = (replace(case, step=step.in_micro_batches(count)) for count in counts)
    return case, _chosen(case, features, cases, "number of micro-batches")


def in_replicas(case: TrainingCase) -> TrainingCase:
    """The case of a replicated batch with a part of it for each of several replicas, whose ranks all have that part.

    Samples are dealt out to the replicas in turn. The seed decides how many replicas there are. The case itself where
    its ranks are no replicas of several.
    """
    ranks = case.mesh.data_ranks
    counts = [count for count in range(2, ranks) if ranks % count == 0]
    if not counts:
        return case
    replicas, every = counts[case.seed % len(counts)], tuple(range(case.layout.batch_size))
    layout = BatchLayout("by-replica", len(every), lists=tuple(every[first::replicas] for first in range(replicas)))
    mesh = replace(case.mesh, dp_shard=ranks // replicas, dp_replicate=replicas)
    return replace(case, mesh=mesh, layout=layout, arithmetic=replace(case.arithmetic, averaging="divide"))


def partly_frozen(case: TrainingCase, features: Features) -> list[TrainingCase]:
    """The case, with some of its layers' parameters frozen, with the others frozen and, if it has a front, with all.

    Squares of its samples' norms are told in advance: that of the case and the last add up to those of the others.
    """
    pieces = list(_freezable(case.model))
    if len(pieces) < 2:
        raise NotExact("the case trains no two parameters that could be frozen")
    order = [pieces[place] for place in prng.permutation(case.seed, "frozen parts", len(pieces))]
    cut = (len(order) + 1) // 2
    parts = [order[:cut], order[cut:]]
    if case.model.has_front:  # what a case does not freeze
        parts.append(order)
    found = [_with_frozen(case, [one for piece in part for one in piece]) for part in parts]
    if not all(map(features.takes, found)):
        raise NotApplicable("the adapter does not accept the case with these parameters frozen")
    return [case, *found]


def _freezable(spec: ModelSpec) -> Iterator[list[_Piece]]:
    """What can be frozen by itself: a layer's weight, or the one that two share, or its bias."""
    for index, layer in enumerate(spec.layers):
        shared = spec.tied is not None and index in spec.tied
        if layer.frozen in ("none", "bias") and not shared:
            yield [(index, "weight")]
        if layer.bias and layer.frozen in ("none", "weight"):
            yield [(index, "bias")]
    if spec.tied is not None and spec.tied[0] >= 0 and spec.layers[spec.tied[0]].frozen in ("none", "bias"):
        yield [(index, "weight") for index in spec.tied]


def _with_frozen(case: TrainingCase, parameters: Sequence[_Piece]) -> TrainingCase:
    layers = list(case.model.layers)
    for index, name in parameters:
        layer = layers[index]
        layers[index] = replace(layer, frozen=name if layer.frozen in ("none", name) else "all")
    return replace(case, model=replace(case.model, layers=tuple(layers)))


def _chosen(case: TrainingCase, features: Features, candidates: Iterable[TrainingCase], what: str) -> TrainingCase:
    """The first candidate that is another case and accepted."""
    for candidate in candidates:
        limit = features.max_world_size or candidate.world_size
        if candidate != case and features.takes(candidate) and candidate.world_size <= limit:
            return candidate
    raise NotApplicable(f"no sibling of this case with another {what} is accepted by the adapter")


def _with_lists(case: TrainingCase) -> TrainingCase:
    """The case with its samples listed, N such that other numbers of ranks have one too, and losses that carry W once:
    with several micro-batches, averages that were averaged again are reduced together."""
    one = listed(case)
    step = replace(one.step, normaliser=_times_world(case))
    if case.arithmetic.world_factors > 1:
        step = step.in_micro_batches(1)
    return replace(one, step=step, arithmetic=replace(one.arithmetic, world_factors=1))


def _times_world(case: TrainingCase) -> int | float:
    """N as a power of two times the ranks with samples of their own, where it is not; of a replicated batch alone."""
    n, world = case.step.normaliser, case.mesh.data_ranks
    if case.layout.kind == "replicated" or is_power_of_two(Fraction(n) / world):
        return n
    return whole_or_float(Fraction(n) * world)


def _worlds(case: TrainingCase) -> Iterator[TrainingCase]:
    """The case on other meshes of at most six ranks, in an order that depends on its seed."""
    meshes = _meshes(case.mesh, range(1, _LARGEST_WORLD + 1))
    places = prng.permutation(case.seed, "another world size", len(meshes))
    return _on(case, [meshes[place] for place in places])


def _to_go_on_at(case: TrainingCase) -> Iterator[TrainingCase]:
    """The case on other meshes of at most 16 ranks, one after another from where its seed says.

    That is the smallest for a seed of 0, and the largest where that writes. Their instrument has as many rows on the
    case's own number of ranks.
    """
    meshes = sorted(_meshes(case.mesh, _TO_GO_ON_AT), key=lambda mesh: mesh.world_size)
    start = len(meshes) - 1 if many_write(case) else case.seed % len(meshes)
    for other in _on(case, meshes[start:] + meshes[:start]):
        both = replace(other, mesh=replace(other.mesh, goes_on_at=case.world_size))
        if models.instrument_rows(both) <= _MOST_ROWS:
            yield both


def _on(case: TrainingCase, meshes: Iterable[MeshSpec]) -> Iterator[TrainingCase]:
    """The case on each other mesh that has an N, the samples of all ranks' lists dealt out again in turn."""
    for mesh in meshes:
        if mesh == case.mesh:
            continue
        scale = Fraction(mesh.data_ranks * mesh.dp_replicate, case.mesh.data_ranks * case.mesh.dp_replicate)
        normaliser = Fraction(case.step.normaliser) * scale
        if not is_power_of_two(normaliser.denominator):
            continue
        step = replace(case.step, normaliser=whole_or_float(normaliser))
        if step.micro_batches > 1:  # on more ranks each has fewer samples, perhaps fewer than micro-batches
            step = step.in_micro_batches(1)
        arithmetic = replace(case.arithmetic, averaging="divide")
        try:
            yield replace(case, mesh=mesh, layout=_dealt(case.layout, mesh), step=step, arithmetic=arithmetic)
        except InvalidCase:  # N is neither a power of two nor one times the other W
            continue


def _meshes(mesh: MeshSpec, shards: Sequence[int]) -> list[MeshSpec]:
    """Meshes of at most the last of ``shards`` ranks with the axes of this one, its model in as many parts or fewer."""
    parts = [tuple((axis, size) for axis, _ in mesh.axes[:1]) for size in (3, 2)] if mesh.axes else []
    found = [
        replace(mesh, dp_shard=size, dp_replicate=replicas, axes=axes)
        for axes in ((), *parts)
        for size in shards
        for replicas in (1, 2, 3)
    ]
    return [one for one in found if one.world_size <= shards[-1]]


def _dealt(layout: BatchLayout, mesh: MeshSpec) -> BatchLayout:
    """The samples of all lists, dealt out in turn to the ranks, or replicas; a replicated batch stays as it is."""
    if layout.kind == "replicated":
        return layout
    samples = [sample for own in layout.lists for sample in own]
    shares = mesh.dp_replicate if layout.kind == "by-replica" else mesh.data_ranks
    return replace(layout, lists=tuple(tuple(samples[share::shares]) for share in range(shares)))


def _without_units(case: TrainingCase, own: UserModelSpec) -> Iterator[TrainingCase]:
    """The case with none of its model's units, all but the first, or all but the last; the root has the rest."""
    traits: tuple[Trait, ...] = tuple(sorted({*own.traits, "root-parameters"}))
    for units in ((), own.units[1:], own.units[:-1]):
        yield replace(case, model=replace(case.model, own=replace(own, units=units, traits=traits)))


def _groupings(case: TrainingCase) -> Iterator[TrainingCase]:
    spec = case.model
    if spec.own is not None:
        yield from _without_units(case, spec.own)
        return
    items = len(spec.layers) + spec.has_front
    for units in ((1,) * items, (items,), (), (items - 1,) if items > 1 else ()):
        other = replace(spec, units=units, bare_units=False)
        if spec.tied is None or len({item_units(other)[place + spec.has_front] for place in spec.tied}) == 1:
            yield replace(case, model=other)
