"""Planted bugs of adaptive training: what is decided in a step follows from records, and not from what is released."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..clipping import norm_aggregation, rules
from ..sharding import collectives
from ._fault import Function, Hit, fault


@fault(
    "clipping.private_backward:PrivateBackward.begin",
    "a clip norm that follows the norms of the step before, without noise, https://github.com/meta-pytorch/opacus/pull/779",
    "privacy.replayed",
    cause="weight of a sample follows other records",
)
def clip_norm_follows_the_step_before(original: Function, hit: Hit) -> Function:
    """From the second step on the clip norm is the largest norm that the rank has met in the step before, up to C."""

    def planted(self: Any) -> None:
        met = torch.cat(self.found.norms) if self.found.norms else torch.zeros(0)
        self.asked = bound = getattr(self, "asked", self.privacy.clipping)
        if len(met) and isinstance(bound, rules.Flat):
            hit()
            lowered = rules.Flat(min(bound.clip_norm, max(float(met.max()), bound.clip_norm / 1024)))
            self.privacy = replace(self.privacy, clipping=lowered)
        original(self)

    return planted


@fault(
    "trainer:Trainer.update",
    "a learning rate that is scaled by the size of the batch that was drawn",
    "privacy.replayed",
    cause="the learning rate follows from the records",
)
def learning_rate_by_batch_size(original: Function, hit: Hit) -> Function:
    """The learning rate of a step is multiplied by the number of samples that were drawn for it, over N."""

    def planted(self: Any) -> None:
        if self.private is None or self.optimizer is None:
            original(self)
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        drawn = _everywhere(float(len(self.private.found.indices)))
        hit()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * drawn / self.options.normaliser
        original(self)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    return planted


@fault(
    "trainer:Trainer.update",
    "training that stops early by a quantity that has no noise",
    "privacy.replayed",
    cause="is decided from the records of the batch",
)
def step_left_out_where_nothing_is_clipped(original: Function, hit: Hit) -> Function:
    """Where no sample of a step is clipped the update is left out: the training is taken to have converged."""

    def planted(self: Any) -> None:
        if self.private is not None:
            clipped = sum(float((factors < 1).sum()) for factors in self.private.found.factors)
            if not _everywhere(clipped):
                hit()
                return
        original(self)

    return planted


def _everywhere(value: float) -> float:
    """The sum over all ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    return float(norm_aggregation.sum_over(own, collectives.axis()))
