"""Floors: the share of drawn cases that must have what sharding bugs hide behind, or trivia fills the quota."""

from __future__ import annotations

from fsdpcheck.case import Case

FLOORS = {
    "uneven rows": 0.30,
    "rows < ranks": 0.15,
    "ragged or empty ranks": 0.30,
    "several units": 0.30,
    "3-D inputs": 0.20,
    "several micro-batches": 0.20,
}
"""Fact of ``census`` -> least share among cases with W > 1, for an implementation that accepts all of them."""


def census(case: Case) -> dict[str, bool]:
    """Facts of one case that floors are counted by; the first six have one."""
    traits, spec = case.requires(), case.model
    return {
        "uneven rows": "uneven-rows" in traits,
        "rows < ranks": "rows<ranks" in traits,
        "ragged or empty ranks": len(set(case.local_sizes)) > 1,
        "several units": len(spec.units) > 1,
        "3-D inputs": spec.input != "vector",
        "several micro-batches": case.step.micro_batches > 1,
        "several steps": case.step.steps > 1,
        "several ranks": case.world_size > 1,
        "tied": spec.tied is not None,
        "frozen": "frozen" in traits,
        "layer norm": spec.layer_norm,
        "padding_idx": spec.padding_idx is not None,
        "momentum": "momentum" in traits,
        "weight decay": "weight-decay" in traits,
        "adamw": "adamw" in traits,
        "float32": "float32" in traits,
        "replicas": "hsdp" in traits,
        "wrap-around": "wrap-around" in traits,
        "replicated": "replicated" in traits,
        "no-sync": "no-sync" in traits,
        "mean": "mean" in traits,
        "deferred": case.step.norms == "deferred",
    }
