"""What a training case demands of an implementation: its traits. Used by ``TrainingCase``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsdpcheck.case.shapes import SPATIAL, item_units, row_counts, stages
from fsdpcheck.case.vocabulary import TRAITS, Trait

if TYPE_CHECKING:
    from fsdpcheck.case.model import ModelSpec, UserModelSpec
    from fsdpcheck.case.training import TrainingCase

OWN_TRAITS: frozenset[Trait] = frozenset(trait for trait, row in TRAITS.items() if row.own)
"""What a user's model can demand by itself; "surrogates" means: when numbers are on a grid."""
_PRIVATE: dict[Trait, Trait] = {trait: row.private for trait, row in TRAITS.items() if row.private is not None}
"""Families of layers that private training asks more of: trait in plain training -> trait under privacy."""

ON_GRIDS: frozenset[Trait] = frozenset({"surrogates", "spelled-out-private"})
"""What a user's model demands only where its numbers are on a grid, the second of a private step alone."""
OF_MODELS = OWN_TRAITS | frozenset(_PRIVATE.values())
"""Traits that are a model's: on a user's own they are what they are, and not drawn."""


def not_in_low_precision(own: bool) -> frozenset[Trait]:
    """The traits of which no case computes in few bits, of ``own`` models of a user or of those that are drawn."""
    allowed = {"any", "own"} if own else {"any"}
    return frozenset(trait for trait, row in TRAITS.items() if row.low_precision not in allowed)


def requires(case: TrainingCase) -> frozenset[Trait]:
    """The traits an implementation must accept to be given this case."""
    return frozenset({*_model_traits(case), *_layout_traits(case), *_step_traits(case), *_number_traits(case)})


def _own_traits(case: TrainingCase, own: UserModelSpec) -> Iterator[Trait]:
    ranks = case.mesh.row_ranks
    apart = {"surrogates"} if case.step.private and case.arithmetic.numbers == "grid" else ON_GRIDS
    found = [trait for trait in own.traits if trait not in apart]
    yield from (_PRIVATE.get(trait, trait) if case.step.private else trait for trait in found)
    facts: dict[Trait, bool] = {
        "rows<ranks": any(rows < ranks for rows in own.rows),
        "uneven-rows": any(rows % ranks for rows in own.rows),
        "keep-unsharded": not case.mesh.reshard_after_forward,
        "hsdp": case.mesh.dp_replicate > 1,
    }
    yield from (trait for trait, holds in facts.items() if holds)


def _model_traits(case: TrainingCase) -> Iterator[Trait]:
    if case.model.own is not None:
        yield from _own_traits(case, case.model.own)
        return
    spec, ranks = case.model, case.mesh.row_ranks
    kinds = {layer.kind for layer in spec.layers}
    facts: dict[Trait, Any] = {
        "bias": any(layer.bias for layer in spec.layers),
        "tokens": spec.input == "tokens",
        "sequence": spec.input in ("sequence", "tokens"),
        "padding_idx": spec.padding_idx is not None,
        "layer-norm": spec.layer_norm or "layer_norm" in kinds,
        "layer-norm-without-bias": any(layer.kind == "layer_norm" and not layer.bias for layer in spec.layers),
        "frozen": any(layer.frozen != "none" for layer in spec.layers),
        "root-parameters": sum(spec.units) < len(spec.layers) + spec.has_front,
        "rows<ranks": any(rows < ranks for rows in row_counts(spec)),
        "uneven-rows": any(rows % ranks for rows in row_counts(spec)),
        "keep-unsharded": not case.mesh.reshard_after_forward,
        "hsdp": case.mesh.dp_replicate > 1,
        "routed-alone": _may_be_left_out(spec),
        "tied-apart": spec.tied is not None and len({item_units(spec)[n + spec.has_front] for n in spec.tied}) > 1,
        "several-heads-private": case.step.private and any(layer.heads for layer in spec.layers),
        "same-padding-private": case.step.private and any(layer.same for layer in spec.layers),
        "bare-units": spec.bare_units,
        "padding-mode-private": case.step.private and any(layer.padding_mode != "zeros" for layer in spec.layers),
        "masked-private": case.step.private and any(layer.mask != "none" for layer in spec.layers),
        "mean-bags-private": case.step.private and spec.bags == "mean",
        "beside-private": case.step.private and any(layer.used == "beside" for layer in spec.layers),
        "across-samples-private": case.step.across != "nothing"
        or (case.step.private and any(layer.used in ("across", "reordered") for layer in spec.layers)),
    }
    yield from (trait for trait, holds in facts.items() if holds)
    families: dict[Trait, bool] = {
        "tied": spec.tied is not None,
        "conv": spec.input in SPATIAL,
        "group-norm": "group_norm" in kinds,
        "rms-norm": "rms_norm" in kinds,
        "attention": "attention" in kinds,
        "bags": spec.input == "bags",
        "routed": any(layer.used == "routed" for layer in spec.layers),
        "reused": any(layer.used == "twice" for layer in spec.layers),
        "one-row": any(layer.used == "for all" for layer in spec.layers),
        "dropped": any(layer.used == "dropped" for layer in spec.layers),
    }
    yield from (_PRIVATE[trait] if case.step.private else trait for trait, holds in families.items() if holds)


def _may_be_left_out(spec: ModelSpec) -> bool:
    """Whether some unit has trained parameters, all in layers that samples may leave out, or that nothing uses.

    The root has its own, the instrument's.
    """
    always, routed = set[int](), set[int]()
    for stage, unit in zip(stages(spec), item_units(spec), strict=True):
        layer = stage.spec
        parts = ("weight", "bias") if layer is not None and layer.bias else ("weight",)
        if layer is None or any(layer.frozen not in (part, "all") for part in parts):
            (routed if layer is not None and layer.used in ("routed", "dropped") else always).add(unit)
    return bool(routed - always - {-1})


_OFF_THE_GRID = {"layer_norm", "rms_norm", "group_norm", "attention", "gelu", "silu", "tanh", "sigmoid", "softmax"}
"""Kinds of layers and activations whose values are no dyadic numbers."""


def _number_traits(case: TrainingCase) -> Iterator[Trait]:
    arithmetic, layers = case.arithmetic, case.model.layers
    used = {layer.kind for layer in layers} | {layer.activation for layer in layers}
    off_the_grid = bool(used & _OFF_THE_GRID) or case.step.loss == "cross_entropy"
    if case.model.own is not None:
        off_the_grid = "surrogates" in case.model.own.traits
    facts: dict[Trait, Any] = {
        "float32": arithmetic.dtype == "float32",
        "project": arithmetic.project,
        "real": arithmetic.numbers == "real",
        "surrogates": arithmetic.numbers == "grid" and off_the_grid,
        "premultiply": arithmetic.averaging == "premultiply",
        "bfloat16": arithmetic.compute == "bfloat16",
        "tf32": arithmetic.compute == "tf32",
    }
    yield from (trait for trait, holds in facts.items() if holds)


def _layout_traits(case: TrainingCase) -> Iterator[Trait]:
    layout, sizes = case.layout, case.local_sizes
    wraps = layout.kind == "sampler" and sum(sizes) > layout.batch_size
    wraps = wraps or len({i for own in layout.lists for i in own}) < sum(map(len, layout.lists))
    facts: dict[Trait, Any] = {
        "replicated": layout.kind == "replicated" and case.world_size > 1,
        "replicated-shards": layout.kind == "by-replica" and case.copies > 1,
        "ragged": len(set(sizes)) > 1,
        "empty-rank": min(sizes) < case.step.micro_batches,
        "wrap-around": wraps,
    }
    yield from (trait for trait, holds in facts.items() if holds)


def _step_traits(case: TrainingCase) -> Iterator[Trait]:
    step = case.step
    facts: dict[Trait, Any] = {
        "micro-batches": step.micro_batches > 1,
        "no-sync": step.micro_batches > 1 and not step.sync_every,
        "mean": step.reduction == "mean",
        "momentum": step.optimizer.momentum > 0,
        "weight-decay": step.optimizer.weight_decay > 0,
        "adam": step.optimizer.kind == "adam",
        "adamw": step.optimizer.kind == "adamw",
        "matrix-optimizer": step.optimizer.kind == "newton_schulz",
        "row-optimizer": step.optimizer.kind == "row_scaled",
        "schedule": step.optimizer.schedule != "constant",
        "resume": step.resume,
        "per-layer-clipping": step.clip_groups != "all",
        "fractional-normaliser": isinstance(step.normaliser, float),
        "evaluation": step.evaluates != "no",
        "inference-mode": step.evaluates == "inference_mode",
        "rebuilt": step.rebuilds,
        "parameter-groups": step.optimizer.groups == "vectors apart",
        "unit-groups": step.optimizer.groups == "last unit apart",
        "thawed": step.thaws,
        "frozen-again": step.refreezes,
        "unequal-micro-batches": step.unequal,
        "secure-noise": step.secure_noise,
    }
    yield from (trait for trait, holds in facts.items() if holds)
