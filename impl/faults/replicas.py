"""Planted bugs of replicas (HSDP): what is done over one mesh axis and forgotten, or done twice, over the other."""

from __future__ import annotations

from typing import Any

import torch

from ..sharding.collectives import ALONE, Axis
from ._fault import Function, Hit, fault


@fault(
    "sharding.collectives:all_reduce_average",
    "the replica group lost, https://github.com/NVIDIA-NeMo/Automodel/pull/3135",
    "training.plain",
    cause="not reduced over the replicas",
)
def replicas_not_reduced(original: Function, hit: Hit) -> Function:
    """Gradients are averaged inside each replica only: replicas drift apart."""

    def planted(unit: Any, values: torch.Tensor, axis: Axis) -> torch.Tensor:
        if axis.size > 1:
            hit()
        return values

    return planted


@fault(
    "sharding.collectives:all_reduce_average",
    "a factor that means something else on two axes, https://github.com/pytorch/pytorch/issues/155903",
    "training.plain",
    cause="exactly R = ",
)
def replicas_summed_not_averaged(original: Function, hit: Hit) -> Function:
    """Gradients are divided by the number of shards, but not by the number of replicas."""

    def planted(unit: Any, values: torch.Tensor, axis: Axis) -> Any:
        if axis.size > 1:
            hit()
        return original(unit, values, axis) * axis.size

    return planted


@fault(
    "sharding.initial_sync:sync_parameters",
    "models that are never made equal, https://github.com/pytorch/torchtitan/issues/166",
    "features.broadcast",
    cause="replicas other than the first start from what",
)
def broadcast_leaves_replicas_out(original: Function, hit: Hit) -> Function:
    """Initial values are broadcast inside each replica, from its own first rank, and not over replicas."""

    def planted(unit_name: str, places: Any, shards: Axis, replicas: Axis) -> None:
        if replicas.size > 1:
            hit()
        original(unit_name, places, shards, ALONE)

    return planted


@fault(
    "sharding.initial_sync:sync_buffers",
    "buffers that do not reach other replicas, https://github.com/pytorch/pytorch/pull/178569",
    "features.broadcast",
    cause="replicas other than the first compute with buffers",
)
def buffers_not_broadcast_over_replicas(original: Function, hit: Hit) -> Function:
    """Buffers are broadcast inside each replica, and over replicas parameters alone."""

    def planted(module: Any, shards: Axis, replicas: Axis) -> None:
        if replicas.size > 1:
            hit()
        original(module, shards, ALONE)

    return planted


@fault(
    "clipping.clip_factors:global_squared_norm",
    "shard norms summed over replicas too, https://github.com/ByteDance-Seed/VeOmni/pull/862",
    "global-norm.returned",
    cause=r"exactly sqrt\(R\) = ",
)
def global_norm_counts_replicas(original: Function, hit: Hit) -> Function:
    """Each shard's squares count once for each replica: the global norm is too large by sqrt(R)."""

    def planted(model: Any) -> Any:
        if model.replicas.size > 1:
            hit()
        return original(model) * model.replicas.size

    return planted
