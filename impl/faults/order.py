"""Planted bugs of collectives: ranks that skip one, issue one alone, or disagree about the order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._fault import Function, Hit, fault

# -- deadlocks and order ----------------------------------------------------------------------------------------------


@fault(
    "trainer:Trainer.micro_step",
    "nothing done for an empty batch, https://github.com/meta-pytorch/opacus/pull/530",
    "collectives.plain",
    cause="without a sample",
)
def empty_rank_skips_its_collectives(original: Function, hit: Hit) -> Function:
    """A rank without rows in a micro-batch skips its forward and backward."""

    def planted(self: Any, micro: Any, sync: bool) -> None:
        if len(micro.inputs):
            original(self, micro, sync)
        else:
            hit()

    return planted


@fault(
    "trainer:Trainer.update",
    "rank 0 gathers for its log, https://github.com/Lightning-AI/pytorch-lightning/issues/17600",
    "collectives.plain",
    cause="rank 0 alone",
)
def rank_zero_gathers_for_its_log(original: Function, hit: Hit) -> Function:
    """Rank 0 alone gathers the full parameters."""

    def planted(self: Any) -> None:
        original(self)
        if self.model.axis.rank == 0 and self.model.axis.size > 1:
            hit()
            self.model.full_values()

    return planted


@fault(
    "sharding.flat_model:reduction_order",
    "same shape, other order, https://github.com/pytorch/pytorch/pull/75902",
    "collectives.plain",
    cause="last rank .*another order",
)
def reduction_order_differs_on_last_rank(original: Function, hit: Hit) -> Function:
    """The last rank reduces two units whose shards have equal sizes in the opposite order."""

    def planted(units: Any) -> Any:
        order = original(units)
        if units[0].axis.rank < units[0].axis.size - 1:
            return order
        sizes = [unit.trainable.shard_numel if unit.trainable is not None else -i for i, unit in enumerate(order)]
        for i, size in enumerate(sizes):
            if size in sizes[:i]:
                hit()
                j = sizes.index(size)
                order[i], order[j] = order[j], order[i]
                break
        return order

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.reduce_gradients",
    "only used parameters reduced, https://github.com/pytorch/pytorch/issues/158719",
    "collectives.plain",
    cause="unit without gradient",
)
def only_used_units_reduced(original: Function, hit: Hit) -> Function:
    """A unit whose local gradients are all zero or missing skips its reduction."""

    def planted(self: Any) -> None:
        gradients = [p.grad for p in self.trainable.parameters if p.grad is not None] if self.trainable else []
        if any(gradient.any() for gradient in gradients):
            original(self)
        elif self.trainable is not None:
            hit()
            self.drop_local_gradients()

    return planted


@fault(
    "clipping.recorder:Recorder._immediate",
    "a parameter touched inside the norm hook, claim C1 of the claims ledger",
    "collectives.private",
    cause="without a sample",
)
def norm_hook_gathers(original: Function, hit: Hit) -> Function:
    """Immediate norms gather the layer's unit again inside the hook, on ranks that have rows only."""

    def planted(self: Any, records: Any, losses: torch.Tensor, mode: Any) -> Any:
        def again(unit: Any, gradient: torch.Tensor) -> None:
            hit()
            unit.reshard()
            unit.unshard()

        for record in records:
            if len(losses):
                record.output.register_hook(partial(again, _unit_of(record.layer)))
        return original(self, records, losses, mode)

    return planted


@fault(
    "clipping.recorder:Recorder._deferred",
    "work keyed to the local batch between two collectives, https://github.com/meta-pytorch/opacus/issues/516",
    "deferred.completes",
    cause="without a sample",
)
def deferred_norms_gather(original: Function, hit: Hit) -> Function:
    """Deferred norms gather each layer's unit again before its norm is computed, on ranks that have rows only."""

    def planted(self: Any, records: Any, losses: torch.Tensor, mode: Any) -> Any:
        for record in records if len(losses) else ():
            hit()
            _unit_of(record.layer).reshard()
            _unit_of(record.layer).unshard()
        return original(self, records, losses, mode)

    return planted


def _unit_of(layer: Any) -> Any:
    """The unit of flat buffers that holds a layer's parameters."""
    own = set(layer.names.values())
    return next(unit for unit in layer.model.units for buffer in unit.buffers if own & set(buffer.names))


@fault(
    "trainer:Trainer.scale",
    "a global that ranks as threads share, https://github.com/pytorch/pytorch/pull/124555",
    "collectives.on-real-ranks",
    cause="share what processes have apart",
)
def scale_of_the_rank_that_came_first(original: Function, hit: Hit) -> Function:
    """The weight of a micro-batch is kept in the module for its number of samples: who asks second has another's."""
    kept: list[int] = []

    def planted(self: Any, micro: Any) -> Any:
        kept.append(self.model.axis.rank)
        if kept[0] == self.model.axis.rank:
            return original(self, micro)
        hit()
        return original(self, micro) * 2

    return planted
