"""Coverage minimums: the least share of drawn cases that has what sharding bugs hide behind."""

from __future__ import annotations

from typing import Final

from fsdpcheck.case import TrainingCase, Trait
from fsdpcheck.case.shapes import Stage, stages

FLOORS = {
    "uneven rows": 0.30,
    "rows < ranks": 0.15,
    "ragged or empty ranks": 0.30,
    "several units": 0.30,
    "3-D inputs": 0.20,
    "several micro-batches": 0.20,
    "4-D and 5-D inputs": 0.15,
    "convolution": 0.15,
    "grouped convolution": 0.05,
    "bags": 0.04,
    "normalisation inside": 0.20,
    "attention": 0.05,
    "tied embedding": 0.04,
    "activation off the grid": 0.30,
}
"""Fact of ``census`` -> least share among cases with W > 1, for an implementation that accepts all of them."""


_RARE: Final[tuple[Trait, ...]] = (
    "evaluation", "inference-mode", "rebuilt", "unequal-micro-batches", "tied-apart", "thawed", "parameter-groups",
    "fractional-normaliser", "matrix-optimizer", "row-optimizer",
    "replicated-shards",
)  # fmt: skip
_OFF_THE_GRID = {"gelu", "silu", "tanh", "sigmoid", "softmax"}


def census(case: TrainingCase) -> dict[str, bool]:
    """Facts of one case that floors are counted by; those in ``FLOORS`` have one."""
    traits, spec = case.requires(), case.model
    kinds = {layer.kind for layer in spec.layers}
    return {
        "uneven rows": "uneven-rows" in traits,
        "rows < ranks": "rows<ranks" in traits,
        "ragged or empty ranks": len(set(case.local_sizes)) > 1,
        "several units": spec.unit_count > 1,
        "3-D inputs": spec.input in ("sequence", "tokens", "signal"),
        "4-D and 5-D inputs": spec.input in ("image", "volume"),
        "several micro-batches": case.step.micro_batches > 1,
        "several steps": case.step.steps > 1,
        "several ranks": case.world_size > 1,
        "tied": spec.tied is not None,
        "tied embedding": spec.tied is not None and spec.tied[0] < 0,
        "frozen": "frozen" in traits,
        "layer norm": spec.layer_norm,
        "padding_idx": spec.padding_idx is not None,
        "momentum": "momentum" in traits,
        "weight decay": "weight-decay" in traits,
        "adam": "adam" in traits,
        "adamw": "adamw" in traits,
        "schedule": "schedule" in traits,
        "resume": "resume" in traits,
        "convolution": "conv" in kinds,
        "grouped convolution": any(_in_groups(stage) for stage in stages(spec)),
        "bags": spec.input == "bags",
        "normalisation inside": bool(kinds & {"layer_norm", "rms_norm", "group_norm"}),
        "layer norm inside": "layer_norm" in kinds,
        "rms norm": "rms_norm" in kinds,
        "group norm": "group_norm" in kinds,
        "attention": "attention" in kinds,
        "several heads": any(layer.heads > 1 for layer in spec.layers),
        "masked attention": any(layer.mask != "none" for layer in spec.layers),
        "padding not of zeros": any(layer.padding_mode != "zeros" for layer in spec.layers),
        "odd padding": any(layer.same and layer.dilation * (layer.kernel - 1) % 2 for layer in spec.layers),
        "means of bags": spec.bags == "mean",
        "unused output": bool(traits & {"dropped", "dropped-private"}),
        "activation off the grid": any(layer.activation in _OFF_THE_GRID for layer in spec.layers),
        "cross-entropy": case.step.loss == "cross_entropy",
        "surrogates": "surrogates" in traits,
        "float32": "float32" in traits,
        "replicas": "hsdp" in traits,
        "premultiplied averages": "premultiply" in traits,
        "bfloat16": "bfloat16" in traits,
        "TF32": "tf32" in traits,
        "wrap-around": "wrap-around" in traits,
        "replicated": "replicated" in traits,
        "no-sync": "no-sync" in traits,
        "mean": "mean" in traits,
        "clipped by unit": "per-layer-clipping" in traits,
        "deferred": case.step.norms == "deferred",
        "routed": bool(traits & {"routed", "routed-private"}),
        "reused": bool(traits & {"reused", "reused-private"}),
        "one row": bool(traits & {"one-row", "one-row-private"}),
        **{trait.replace("-", " "): trait in traits for trait in _RARE},
    }


def _in_groups(stage: Stage) -> bool:
    """Whether a convolution has several groups of several channels: neither one group nor one for each channel."""
    return stage.kind == "conv" and stage.spec is not None and 1 < stage.spec.groups < stage.entering[0]
