"""Planted bugs of accounts: an accountant is told what did not run, or public values follow from the data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..sharding import collectives
from ._fault import Function, Hit, fault


@fault(
    "accounting:Ledger.load_state_dict",
    "a ledger that begins again after a stop, https://github.com/meta-pytorch/opacus/pull/429",
    "privacy.accounted",
    cause="does not come back",
)
def ledger_begins_again(original: Function, hit: Hit) -> Function:
    """What was spent before a stop is not taken over."""

    def planted(self: Any, state_dict: dict[str, Any]) -> None:
        hit()

    return planted


@fault(
    "accounting:Ledger.add",
    "a rate of one rank's share, https://github.com/meta-pytorch/opacus/issues/813",
    "privacy.accounted",
    cause="divided by the number of ranks",
)
def rate_of_one_rank(original: Function, hit: Hit) -> Function:
    """The accountant is told the rate over the number of ranks, as if each drew for itself alone."""

    def planted(self: Any, noise_multiplier: float, rate: float) -> None:
        world = collectives.axis().size
        if world > 1:
            hit()
        original(self, noise_multiplier, rate / world)

    return planted


@fault(
    "trainer:Trainer.accumulate",
    "micro-batches that are taken for steps, https://github.com/meta-pytorch/opacus/issues/683",
    "privacy.accounted",
    cause="micro-batches are counted",
)
def micro_batches_are_accounted(original: Function, hit: Hit) -> Function:
    """Each micro-batch of a step is told as a step of its own."""

    def planted(self: Any, micro_batches: Any) -> None:
        original(self, micro_batches)
        for _ in micro_batches[1:]:
            hit()
            self.account()

    return planted


@fault(
    "accounting:Draws.__init__",
    "a divisor that is counted off the data set; no public report known",
    "privacy.engine",
    cause="divisor follows from the size",
)
def divisor_of_the_data_set(original: Function, hit: Hit) -> Function:
    """N is the rate times the number of records that the training is built on."""

    def planted(self: Any, plan: Any, records: int, *rest: Any) -> None:
        original(self, plan, records, *rest)
        hit()
        self.plan = replace(plan, size=records)

    return planted


@fault(
    "accounting:Draws.__init__",
    "a rate of one over the number of batches, https://github.com/meta-pytorch/opacus/issues/813",
    "privacy.engine",
    cause="rate follows from the size",
)
def rate_of_the_number_of_batches(original: Function, hit: Hit) -> Function:
    """The rate is one over the number of batches that the data set has, which a record more may make one more."""

    def planted(self: Any, plan: Any, records: int, *rest: Any) -> None:
        batches = max(1, math.ceil(records / max(1, round(plan.rate * plan.size))))
        hit()
        original(self, replace(plan, rate=1 / batches), records, *rest)

    return planted


@fault(
    "accounting:Draws.__init__",
    "a number of steps that is counted in epochs of the data set; no public report known",
    "privacy.engine",
    cause="steps follows from the size",
)
def steps_of_the_data_set(original: Function, hit: Hit) -> Function:
    """As many steps are taken as epochs of the data set have records."""

    def planted(self: Any, plan: Any, records: int, *rest: Any) -> None:
        hit()
        original(self, replace(plan, steps=plan.steps * records), records, *rest)

    return planted
