"""What makes a Case consistent, and what it demands of an implementation. Used by ``Case`` alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsdpcheck.errors import InvalidCase

if TYPE_CHECKING:
    from fsdpcheck.case import Case, ModelSpec, Trait

MAX_WORLD_SIZE = 64
_MAX_ELEMENTS = 1 << 22
"""Largest model and largest data set a case may describe, so that a hostile token cannot ask for all memory."""


def validate(case: Case) -> None:
    """Raises InvalidCase, naming the field, when the case contradicts itself or leaves the supported ranges."""
    for where, value, low, high in _ranges(case):
        if not low <= value <= high:
            _refuse(where, value, f"a number from {low} to {high}", "choose one in the range")
    _validate_model(case.model)
    _validate_layout(case)
    _validate_step(case)
    _validate_optimizer(case)
    _validate_size(case)


def requires(case: Case) -> frozenset[Trait]:
    """The traits an implementation must accept to be given this case."""
    return frozenset({*_model_traits(case), *_layout_traits(case), *_step_traits(case)})


def row_counts(spec: ModelSpec) -> tuple[int, ...]:
    """Rows (size of dim 0) of the body's weights, and so of its biases, in forward order."""
    front = {"tokens": spec.vocabulary}.get(spec.input, spec.features)
    return ((front,) if spec.has_front else ()) + tuple(layer.width for layer in spec.layers)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _refuse(where: str, got: object, wanted: str, then: str) -> None:
    raise InvalidCase(f"{where}: got {got!r}, wanted {wanted}; {then}")


def _ranges(case: Case) -> Iterator[tuple[str, float, float, float]]:
    """(field, value, lowest, highest) of every number."""
    model, step, layout = case.model, case.step, case.layout
    yield "mesh.dp_shard", case.mesh.dp_shard, 1, MAX_WORLD_SIZE
    yield "mesh.dp_replicate", case.mesh.dp_replicate, 1, MAX_WORLD_SIZE
    yield "the world size dp_shard * dp_replicate", case.world_size, 1, MAX_WORLD_SIZE
    yield "the number of model.layers", len(model.layers), 1, 64
    for index, layer in enumerate(model.layers):
        yield f"model.layers[{index}].width", layer.width, 1, 4096
    yield "model.features", model.features, 1, 4096
    yield "model.length", model.length, 1, 4096
    yield "model.vocabulary", model.vocabulary, 1, 1 << 16
    for index, size in enumerate(model.units):
        yield f"model.units[{index}]", size, 1, 65
    yield "layout.batch_size", layout.batch_size, 1, 4096
    for rank, count in enumerate(layout.counts):
        yield f"layout.counts[{rank}]", count, 0, 4096
    yield "step.steps", step.steps, 1, 256
    yield "step.micro_batches", step.micro_batches, 1, 256
    yield "step.normaliser", step.normaliser, 1, 1 << 40
    yield "step.clip_norm", step.clip_norm, 1, 1 << 52
    if step.max_grad_norm is not None:
        yield "step.max_grad_norm", step.max_grad_norm, 2.0**-64, 2.0**64
    yield "step.optimizer.lr_exponent", step.optimizer.lr_exponent, 0, 64
    yield "step.optimizer.momentum", step.optimizer.momentum, 0.0, 1.0
    yield "step.optimizer.weight_decay", step.optimizer.weight_decay, 0.0, 1.0
    yield "arithmetic.weights", case.arithmetic.weights, 1, 1 << 20
    yield "arithmetic.inputs", case.arithmetic.inputs, 1, 1 << 20
    yield "seed", case.seed, 0, (1 << 64) - 1


def _validate_model(spec: ModelSpec) -> None:
    items = len(spec.layers) + spec.has_front
    if sum(spec.units) > items:
        _refuse("model.units", spec.units, f"sizes that add up to at most {items} layers", "make units smaller")
    if spec.padding_idx is not None and spec.input != "tokens":
        _refuse("model.padding_idx", spec.padding_idx, "None without an Embedding", 'set input to "tokens"')
    if spec.padding_idx is not None and not 0 <= spec.padding_idx < spec.vocabulary:
        _refuse("model.padding_idx", spec.padding_idx, f"a row of the {spec.vocabulary}", "choose a smaller row")
    if spec.layer_norm and spec.input == "tokens":
        _refuse("model.layer_norm", True, "False with tokens", "a LayerNorm stands on raw vectors or sequences")
    if spec.layer_norm and (spec.features < 2 or not is_power_of_two(spec.features)):
        _refuse("model.features", spec.features, "an even power of two under a LayerNorm", "use 2, 4 or 8")
    if spec.tied is not None:
        _validate_tied(spec, *spec.tied)


def _validate_tied(spec: ModelSpec, first: int, second: int) -> None:
    lowest = -1 if spec.input == "tokens" else 0
    if not lowest <= first < second < len(spec.layers):
        _refuse("model.tied", (first, second), f"{lowest} <= first < second < {len(spec.layers)}", "name two layers")
    shapes = _weight_shapes(spec)
    one, two = shapes[first - lowest], shapes[second - lowest]
    if one != two:
        _refuse("model.tied", f"weights of shapes {one} and {two}", "equal shapes", "make the two layers alike")
    frozen = [first >= 0 and spec.layers[first].frozen in ("weight", "all")]
    frozen.append(spec.layers[second].frozen in ("weight", "all"))
    if frozen[0] != frozen[1]:
        _refuse("model.tied", "one layer with a frozen weight", "both or neither frozen", "freeze the shared weight")
    units = unit_of_layers(spec)
    if units[first - lowest] != units[second - lowest]:
        _refuse("model.tied", "layers of two sharding units", "layers of one unit", "join the units")


def unit_of_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Index of the sharding unit of every layer with parameters, -1 for the root; a LayerNorm in front is left out."""
    units = [unit for unit, size in enumerate(spec.units) for _ in range(size)]
    units += [-1] * (len(spec.layers) + spec.has_front - len(units))
    return tuple(units[1:] if spec.layer_norm else units)


def _weight_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Weight shapes of the Embedding, if there is one, and the Linear layers."""
    widths = [spec.features, *(layer.width for layer in spec.layers)]
    shapes = [(rows, columns) for columns, rows in itertools.pairwise(widths)]
    return [(spec.vocabulary, spec.features), *shapes] if spec.input == "tokens" else shapes


def _validate_layout(case: Case) -> None:
    layout, world = case.layout, case.world_size
    if layout.kind == "ragged" and (len(layout.counts) != world or sum(layout.counts) != layout.batch_size):
        wanted = f"{world} counts that add up to {layout.batch_size}"
        _refuse("layout.counts", layout.counts, wanted, "one count a rank of the mesh")
    if layout.kind != "ragged" and layout.counts:
        _refuse("layout.counts", layout.counts, f"none for a {layout.kind} layout", 'only "ragged" has counts')
    if layout.kind != "sampler" and (layout.shuffle or layout.drop_last):
        _refuse("layout.shuffle, drop_last", (layout.shuffle, layout.drop_last), "False", 'only "sampler" has them')


def _validate_step(case: Case) -> None:
    step, world = case.step, case.world_size
    if not is_power_of_two(step.normaliser) and (
        step.normaliser % world or not is_power_of_two(step.normaliser // world)
    ):
        _refuse("step.normaliser", step.normaliser, f"a power of two, or one times W = {world}", "choose such an N")
    if step.reduction == "mean":
        _validate_mean(case)
    if step.private and step.max_grad_norm is not None:
        _refuse("step.max_grad_norm", step.max_grad_norm, "None with per-sample clipping", "clip one way")
    if not step.private and (step.norms, step.contribution) != ("immediate", "complete"):
        got = (step.norms, step.contribution)
        _refuse("step.norms, contribution", got, "the defaults without clipping", "there are no per-sample norms")


def _validate_mean(case: Case) -> None:
    """Local means averaged over ranks are the single device's mean only for equal local sizes, in one micro-batch."""
    sizes, step = set(case.local_sizes), case.step
    size = min(sizes)
    if len(sizes) > 1 or not is_power_of_two(size) or step.micro_batches > 1 or case.layout.kind == "replicated":
        got = f"local sizes {case.local_sizes} of a {case.layout.kind} batch in {step.micro_batches} micro-batches"
        _refuse("step.reduction", f'"mean" with {got}', "equal powers of two in one micro-batch", 'or use "sum"')
    if step.normaliser != case.world_size * size:
        _refuse("step.normaliser", step.normaliser, f"W * local size = {case.world_size * size} with a mean", "set it")


def _validate_optimizer(case: Case) -> None:
    optimizer = case.step.optimizer
    for name, value in (("momentum", optimizer.momentum), ("weight_decay", optimizer.weight_decay)):
        if not (value * 2.0**16).is_integer():
            _refuse(f"step.optimizer.{name}", value, "a multiple of 2**-16", "use 0.5 or 0.25")
    if optimizer.kind == "adamw" and optimizer.momentum:
        _refuse("step.optimizer.momentum", optimizer.momentum, "0.0 with adamw", "its betas are fixed")


def _validate_size(case: Case) -> None:
    spec = case.model
    parameters = sum(rows * columns for rows, columns in _weight_shapes(spec))
    widest = max(spec.features, *(layer.width for layer in spec.layers))
    positions = 1 if spec.input == "vector" else spec.length
    samples = case.layout.batch_size * case.step.steps
    for where, size in (("the model", parameters), ("the data set", samples * positions * widest)):
        if size > _MAX_ELEMENTS:
            _refuse(f"the size of {where}", size, f"at most {_MAX_ELEMENTS} elements", "make the case smaller")


def _model_traits(case: Case) -> Iterator[Trait]:
    spec, ranks = case.model, case.mesh.dp_shard
    facts: dict[Trait, Any] = {
        "bias": any(layer.bias for layer in spec.layers),
        "tokens": spec.input == "tokens",
        "sequence": spec.input != "vector",
        "padding_idx": spec.padding_idx is not None,
        "layer-norm": spec.layer_norm,
        "tied": spec.tied is not None and not case.step.private,
        "tied-private": spec.tied is not None and case.step.private,
        "frozen": any(layer.frozen != "none" for layer in spec.layers),
        "root-parameters": sum(spec.units) < len(spec.layers) + spec.has_front,
        "rows<ranks": any(rows < ranks for rows in row_counts(spec)),
        "uneven-rows": any(rows % ranks for rows in row_counts(spec)),
        "keep-unsharded": not case.mesh.reshard_after_forward,
        "hsdp": case.mesh.dp_replicate > 1,
        "float32": case.arithmetic.dtype == "float32",
    }
    yield from (trait for trait, holds in facts.items() if holds)


def _layout_traits(case: Case) -> Iterator[Trait]:
    layout, sizes = case.layout, case.local_sizes
    wraps = layout.kind == "sampler" and sum(sizes) > layout.batch_size
    facts: dict[Trait, Any] = {
        "replicated": layout.kind == "replicated" and case.world_size > 1,
        "ragged": len(set(sizes)) > 1,
        "empty-rank": min(sizes) < case.step.micro_batches,
        "wrap-around": wraps,
    }
    yield from (trait for trait, holds in facts.items() if holds)


def _step_traits(case: Case) -> Iterator[Trait]:
    step = case.step
    facts: dict[Trait, Any] = {
        "micro-batches": step.micro_batches > 1,
        "no-sync": step.micro_batches > 1 and not step.sync_every,
        "mean": step.reduction == "mean",
        "momentum": step.optimizer.momentum > 0,
        "weight-decay": step.optimizer.weight_decay > 0,
        "adamw": step.optimizer.kind == "adamw",
        "project": case.arithmetic.project,
    }
    yield from (trait for trait, holds in facts.items() if holds)
