"""Planted bugs of sharding and stepping: averaging, lost or stale shards, accumulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..clipping import norm_aggregation
from ..clipping.batch_layout import REPLICATED
from ..sharding import collectives
from ..sharding.collectives import Axis
from ._fault import Function, Hit, fault

# -- averaging --------------------------------------------------------------------------------------------------------


@fault(
    "sharding.collectives:reduce_scatter_average",
    "AVG on top of a global mean, https://github.com/meta-pytorch/torchtune/pull/2172",
    "rounding.gradients",
    cause="exactly 1/[WS] = ",
)
def averaged_twice(original: Function, hit: Hit) -> Function:
    """Reduced gradients are divided by W once more."""

    def planted(unit: Any, full: torch.Tensor, axis: Axis) -> Any:
        hit()
        return original(unit, full, axis) / axis.size

    return planted


@fault(
    "sharding.collectives:reduce_scatter_average",
    "divisor forgotten, https://github.com/meta-pytorch/opacus/issues/324",
    "training.plain",
    cause="exactly [WS] = ",
)
def summed_not_averaged(original: Function, hit: Hit) -> Function:
    """Reduced gradients are sums over ranks, never divided by W."""

    def planted(unit: Any, full: torch.Tensor, axis: Axis) -> Any:
        hit()
        return original(unit, full, axis) * axis.size

    return planted


@fault(
    "trainer:Trainer.scale",
    "local means of uneven batches averaged, https://github.com/pytorch/torchtitan/pull/2206",
    "training.plain",
    cause="local means",
)
def local_means(original: Function, hit: Hit) -> Function:
    """Each rank backpropagates the mean over its own rows, whatever their number."""

    def planted(self: Any, micro: Any) -> float:
        hit()
        return 1 / max(len(micro.inputs), 1)

    return planted


@fault(
    "trainer:Trainer.step",
    "normalised by micro-batches too, https://github.com/ml-explore/mlx-lm/pull/1413",
    "training.plain",
    cause="exactly 1/K = ",
)
def divided_by_micro_batches(original: Function, hit: Hit) -> Function:
    """The gradient of K micro-batches is divided by K although N already counts all samples."""

    def planted(self: Any, micro_batches: Any) -> None:
        options = self.options
        self.options = replace(options, normaliser=options.normaliser * len(micro_batches))
        hit()
        try:
            original(self, micro_batches)
        finally:
            self.options = options

    return planted


@fault(
    "trainer:Trainer.micro_step",
    "wrap-around rows, https://github.com/pytorch/pytorch/issues/25162",
    "training.*",
    cause="duplicates are dropped",
)
def wrapped_rows_dropped(original: Function, hit: Hit) -> Function:
    """A sample that a lower rank has in the same micro-batch is left out, as if duplicates did not count."""

    def planted(self: Any, micro: Any, sync: bool) -> Any:
        if self.options.layout == REPLICATED:
            return original(self, micro, sync)
        everyone = collectives.axis()
        lower = [set(rows) for rows in _indices_by_rank(micro.indices, everyone)[: everyone.rank]]
        keep = [i for i, index in enumerate(micro.indices) if not any(index in rows for rows in lower)]
        if len(keep) < len(micro.indices):
            hit()
        indices = [micro.indices[i] for i in keep]
        return original(self, type(micro)(micro.inputs[keep], micro.targets[keep], indices), sync)

    return planted


def _indices_by_rank(indices: Any, axis: Axis) -> list[list[int]]:
    counts = torch.empty(axis.size, dtype=torch.int64)
    collectives.all_gather(norm_aggregation.INDICES, counts, torch.tensor([len(indices)]), axis)
    most = int(counts.max())
    padded = torch.tensor([*indices, *[-1] * (most - len(indices))], dtype=torch.int64)
    everyone = torch.empty(axis.size * most, dtype=torch.int64)
    collectives.all_gather(norm_aggregation.INDICES, everyone, padded, axis)
    return [rows[: int(count)] for rows, count in zip(everyone.view(axis.size, most).tolist(), counts, strict=True)]


# -- shards -----------------------------------------------------------------------------------------------------------


@fault(
    "sharding.flat_buffer:FlatBuffer.start",
    "offsets right only where W divides n, https://github.com/deepspeedai/DeepSpeed/pull/1380",
    "training.plain",
    cause=r"start at rank \* floor",
)
def shard_starts_rounded_down(original: Any, hit: Hit) -> Any:
    """A shard starts at rank * floor(n / W) although it has ceil(n / W) elements."""

    def planted(self: Any) -> int:
        hit()
        start: int = self.axis.rank * (self.numel // self.axis.size)
        return start

    return property(planted)


@fault(
    "sharding.collectives:all_gather",
    "stale tail after an update, https://github.com/pytorch/torchtitan/issues/1136",
    "training.plain",
    cause="shard of the last rank .*stale",
)
def last_shard_stale(original: Function, hit: Hit) -> Function:
    """The last rank always sends the parameters it had when they were first gathered."""

    def planted(unit: Any, full: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        for buffer in getattr(unit, "buffers", []):
            if axis.size > 1 and axis.rank == axis.size - 1 and shard.data_ptr() == buffer.shard.data_ptr():
                hit()
                if not hasattr(buffer, "_first_shard"):
                    buffer._first_shard = shard.clone()
                shard = buffer._first_shard
                break
        original(unit, full, shard, axis)

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.reshard",
    "a unit stays unsharded, https://github.com/pytorch/pytorch/issues/83129",
    "training.*",
    cause="first step's parameters",
)
def units_never_resharded(original: Function, hit: Hit) -> Function:
    """Gathered parameters are never freed, so later steps compute with the first step's values."""

    def planted(self: Any) -> None:
        hit()

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.reduce_gradients",
    "parameters outside units not synchronised, https://github.com/pytorch/pytorch/issues/98281",
    "training.plain",
    cause=r"\(root\) are not reduced",
)
def root_gradients_not_reduced(original: Function, hit: Hit) -> Function:
    """The root unit's gradients stay local: each rank updates its shard with its own samples only."""

    def planted(self: Any) -> Any:
        if self.fqn != "(root)" or self.trainable is None:
            return original(self)
        hit()
        flat = self.trainable
        full = flat.pack([parameter.grad for parameter in flat.parameters])
        self.drop_local_gradients()
        return self.accumulate(full[flat.start : flat.start + flat.shard_numel].clone())

    return planted


@fault(
    "trainer:Trainer.update",
    "the update of one rank skipped, https://github.com/facebookresearch/fairscale/issues/180",
    "rounding.update",
    cause="last rank .*did not move",
)
def update_skipped_on_last_rank(original: Function, hit: Hit) -> Function:
    """The last of several ranks does not step its optimizer."""

    def planted(self: Any) -> None:
        if 1 < self.model.axis.size == self.model.axis.rank + 1:
            hit()
        else:
            original(self)

    return planted


@fault(
    "sharding.flat_model:ShardedModel.__init__",
    "one shard a replica: nothing is sharded, https://github.com/pytorch/pytorch/issues/154888",
    "shards.cover",
    cause="nothing is sharded",
)
def replicated_instead_of_sharded(original: Function, hit: Hit) -> Function:
    """The one axis to shard over is taken for one of replicas: training is right, and no memory is saved."""

    def planted(
        self: Any, module: Any, units: Any, axis: Axis, reshard: Any, replicas: Axis = collectives.ALONE, **options: Any
    ) -> None:
        if axis.size > 1 and replicas.size == 1:
            hit()
            axis, replicas = replicas, axis
        original(self, module, units, axis, reshard, replicas, **options)

    return planted


# -- accumulation -----------------------------------------------------------------------------------------------------


@fault(
    "trainer:Trainer.micro_step",
    "only the last micro-batch survives, https://github.com/allenai/open-instruct/pull/1498",
    "training.plain",
    cause="only the last micro-batch counts",
)
def no_sync_drops_micro_batches(original: Function, hit: Hit) -> Function:
    """With gradient sync off, a micro-batch's gradients are dropped instead of kept."""

    def planted(self: Any, micro: Any, sync: bool) -> None:
        original(self, micro, sync)
        if not sync:
            hit()
            for unit in self.model.units:
                unit.drop_local_gradients()

    return planted


@fault(
    "trainer:Trainer.as_many_everywhere",
    "uneven inputs, https://github.com/pytorch/pytorch/issues/38174",
    "training.unequal-micro-batches",
    cause="ranks part where some have run out of micro-batches: .*, with one fewer",
)
def unequal_numbers_taken_for_equal(original: Function, hit: Hit) -> Function:
    """Ranks that run out of micro-batches go on without the others."""

    def planted(self: Any, micro_batches: Any) -> Any:
        if self.options.unequal_micro_batches:
            hit()
        return micro_batches

    return planted


@fault(
    "trainer:Trainer.as_many_everywhere",
    "samples repeated to even out, https://github.com/huggingface/accelerate/issues/2316",
    "training.unequal-micro-batches",
    cause="ranks with fewer micro-batches than others take their last again",
)
def missing_micro_batches_repeat_the_last(original: Function, hit: Hit) -> Function:
    """Ranks with fewer micro-batches go through their last once more, where an empty one belongs."""

    def planted(self: Any, micro_batches: Any) -> Any:
        everywhere = original(self, micro_batches)
        missing = len(everywhere) - len(micro_batches)
        if missing:
            hit()
        return [*micro_batches, *[micro_batches[-1]] * missing]

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.accumulate",
    "the saved shard is overwritten, https://github.com/pytorch/pytorch/pull/73535",
    "training.plain",
    cause="only the last micro-batch counts",
)
def reduced_gradient_overwritten(original: Function, hit: Hit) -> Function:
    """With gradient sync after every micro-batch, each reduction replaces the one before."""

    def planted(self: Any, gradient: torch.Tensor) -> None:
        hit()
        self.trainable.shard.grad = gradient

    return planted
