"""Planted bugs that depend on what must not matter: how many ranks, units, micro-batches, and in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..sharding import collectives
from ._fault import Function, Hit, fault


@fault(
    "trainer:Trainer.scale",
    "linear scaling on top of an average, https://github.com/pytorch/torchtitan/pull/2206",
    "invariance.*world",
    cause="exactly [WS] = ",
)
def weighed_for_the_ranks_that_are_there(original: Function, hit: Hit) -> Function:
    """Each sample's weight grows once more with the number of ranks, as if its learning rate were scaled with it."""

    def planted(self: Any, micro: Any) -> Any:
        hit()
        return original(self, micro) * self.model.axis.size

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.accumulate",
    "a parameter's size rule applied to the unit's, https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2081",
    "invariance.*units",
    cause="gradients of .* rounded to 4 bits.* when they are reduced",
)
def large_units_in_low_precision(original: Function, hit: Hit) -> Function:
    """Units with more than 8 elements a shard have their gradient rounded to four bits; small ones are kept."""

    def planted(self: Any, gradient: torch.Tensor) -> None:
        if gradient.numel() > 8:
            hit()
            mantissa, exponent = torch.frexp(gradient)
            gradient = torch.ldexp((mantissa * 16).round() / 16, exponent)
        original(self, gradient)

    return planted


@fault(
    "sharding.flat_model:ShardedModel.reshard",
    "a unit that stays unsharded, https://github.com/pytorch/pytorch/issues/83129",
    "invariance.*reshard",
    cause="first step's parameters",
)
def kept_parameters_never_freed(original: Function, hit: Hit) -> Function:
    """Where parameters are kept after the forward, nothing frees them after the backward: later steps use old ones."""

    def planted(self: Any) -> None:
        if self.reshard_after_forward:
            original(self)
        else:
            hit()

    return planted


@fault(
    "trainer:Trainer.micro_step",
    "rows cut off to make a batch even, https://github.com/pytorch/pytorch/issues/25162",
    "invariance.*samples",
    cause="last sample of each micro-batch of 3, 5, .* is left out",
)
def odd_row_dropped(original: Function, hit: Hit) -> Function:
    """The last row of a micro-batch of 3, 5, ... rows is left out, as for a kernel that wants pairs."""

    def planted(self: Any, micro: Any, sync: bool) -> Any:
        rows = len(micro.indices)
        if rows % 2 and rows > 1:
            hit()
            rows -= 1
        return original(self, type(micro)(micro.inputs[:rows], micro.targets[:rows], micro.indices[:rows]), sync)

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.reduce_gradients",
    "a gradient buffer used for two reductions, https://github.com/pytorch/pytorch/pull/73535",
    "invariance.*micro-batches",
    cause="not cleared when they are reduced",
)
def local_gradients_survive_their_reduction(original: Function, hit: Hit) -> Function:
    """Local gradients are not released when they are reduced: the next micro-batch's reduction counts them again."""

    def planted(self: Any) -> None:
        if self.trainable is None:
            return
        kept = [parameter.grad for parameter in self.trainable.parameters]
        original(self)
        for parameter, gradient in zip(self.trainable.parameters, kept, strict=True):
            if gradient is not None:
                hit()
                parameter.grad = gradient

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.__init__",
    "no broadcast of initial parameters, https://github.com/pytorch/torchtitan/issues/166",
    "invariance.*initial",
    cause="those of replica 0 are not broadcast",
)
def replicas_start_apart(original: Function, hit: Hit) -> Function:
    """Each replica adds its number to the parameters it starts from, as if it had a seed of its own."""

    def planted(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        for buffer in self.buffers if self.replicas.rank else ():
            hit()
            buffer.shard.data += self.replicas.rank

    return planted


_MICRO_BATCHES: Counter[int] = Counter()
"""By rank of the default group: what the planted warm-up below counts, which outlives a training."""
_WARM_UP = 7
"""Micro-batches after which it begins again, for one that has ended would show nothing in a process that lives long."""


@fault(
    "trainer:Trainer.scale",
    "state of one training found by the next, https://github.com/facebookresearch/fairscale/issues/780",
    "invariance.*repeated",
    cause="state of an earlier training outlives it",
)
def warm_up_outlives_its_training(original: Function, hit: Hit) -> Function:
    """Samples' weight is warmed up again and again by a counter of the process, which the next training finds going."""

    def planted(self: Any, micro: Any) -> Any:
        hit()
        rank = collectives.axis().rank
        _MICRO_BATCHES[rank] = _MICRO_BATCHES[rank] % _WARM_UP + 1
        return original(self, micro) * (1 - 2.0 ** -_MICRO_BATCHES[rank])

    return planted
