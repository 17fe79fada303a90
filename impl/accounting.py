"""Accounts: what an accountant has to be told of a private training, and a training that tells nothing of its data.

The epsilon that a training has spent follows from its steps alone: with which noise multiplier each was taken, and with
which probability records joined it. So they are written down where steps are taken, and go with the checkpoint. That
epsilon holds only if everything else that shows - divisor, number of steps and of micro-batches, rate, learning rate -
is the same for a data set and for one with a record less. So nothing here follows from the size of the data set.

Source: Abadi et al. 2016, arXiv:1607.00133; Kairouz et al. 2021, arXiv:1912.04977, section 4 (what is public).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .noise.gaussian import Noise
from .sampling.poisson import PoissonSampler
from .sharding.collectives import ALONE, Axis


@dataclass
class Ledger:
    """(noise multiplier, rate, steps) of all steps so far, in their order; steps that are alike stand in one entry.

    It is ``Stateful``: pass it to ``state.save`` and ``state.load`` as ``extra``.
    """

    entries: list[tuple[float, float, int]] = field(default_factory=list)

    def add(self, noise_multiplier: float, rate: float) -> None:
        """Another step was taken."""
        if self.entries and self.entries[-1][:2] == (noise_multiplier, rate):
            self.entries[-1] = (noise_multiplier, rate, self.entries[-1][2] + 1)
        else:
            self.entries.append((noise_multiplier, rate, 1))

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"entries": [list(entry) for entry in self.entries]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take the steps over that were taken before."""
        self.entries = [
            (float(multiplier), float(rate), int(steps)) for multiplier, rate, steps in state_dict["entries"]
        ]


@dataclass(frozen=True)
class Plan:
    """All that is public of a private training, decided before anybody looks at the data.

    ``size``: a number of records that is public, and that the data set has at most. ``rate``: with which probability
    each joins a step. ``capacity``: rows of a micro-batch at most.
    """

    size: int
    rate: float
    steps: int
    capacity: int
    learning_rate: float
    noise_multiplier: float = 1.0

    @property
    def normaliser(self) -> float:
        """N: the expected number of records of a batch, if there were as many as are public."""
        return self.rate * self.size


class Draws:
    """Poisson draws of a data set of ``records``, of which only ``plan`` shows. ``key``, ``axis`` are a sampler's."""

    def __init__(self, plan: Plan, records: int, key: Noise, axis: Axis = ALONE) -> None:
        if not 0 <= records <= plan.size:
            raise ValueError(f"got a data set of {records} records, wanted at most the {plan.size} that are public")
        self.plan, self.records = plan, records
        self.sampler = PoissonSampler(plan.size, plan.rate, plan.capacity, key, axis)

    def draw(self, step: int) -> list[list[int]]:
        """Records of ``step``, dealt out to micro-batches whose number is public; as PoissonSampler.draw."""
        joined = (record for chunk in self.sampler.draw(step) for record in chunk if record < self.records)
        return self.sampler.dealt_out(list(joined))
