"""Poisson sampling over ranks: every record joins every step by itself, with probability q, whatever the others do.

Rank r owns the records r * ceil(D / W) ... of a data set of D, and draws for these only. The draw of record i at step s
is a function of (key, i, s), so the logical batch of a step is the same for every W. Its size is private: local batches
are unequal and may be empty, and nothing that others can see may depend on them. Hence

* every rank takes the same, public number of micro-batches, ``capacity`` rows at most each, some of them empty;
* N, what the sum is divided by, is the *expected* batch size q D, never the drawn one;
* the number of steps is public.

Source: Abadi et al. 2016, arXiv:1607.00133, section 3 ("lots"); amplification by Poisson sampling, Balle et al. 2018,
arXiv:1807.01647.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from ..noise.gaussian import Noise
from ..sharding.collectives import ALONE, Axis

_NAME = "(which records join)"
_OVERFLOW = 2.0**-40
"""Bound on the probability that a rank draws more than it has room for, in one step."""


@dataclass(frozen=True)
class PoissonSampler:
    """Draws of ``dataset_size`` records with probability ``rate``, in micro-batches of at most ``capacity`` rows.

    ``key`` is a ``noise.Noise``, made by ``seeded`` or ``secure``, of its own: not the one that the noise has.
    ``axis``: all ranks that take samples of their own, which with replicas (HSDP) are those of both axes.
    """

    dataset_size: int
    rate: float
    capacity: int
    key: Noise
    axis: Axis = ALONE

    def __post_init__(self) -> None:
        if not (self.dataset_size > 0 and 0 < self.rate <= 1 and self.capacity > 0):
            raise ValueError(
                f"got {self.dataset_size} records, rate {self.rate}, capacity {self.capacity};"
                " wanted positive numbers and a rate of at most 1"
            )

    @property
    def expected_batch_size(self) -> float:
        """N: expected number of records of a logical batch."""
        return self.rate * self.dataset_size

    @property
    def own(self) -> range:
        """The records of this rank; none on the last ranks of a very small data set."""
        share = -(-self.dataset_size // self.axis.size)
        start = min(self.axis.rank * share, self.dataset_size)
        return range(start, min(start + share, self.dataset_size))

    @property
    def micro_batches(self) -> int:
        """How many micro-batches every rank takes in every step: room for all but 2^-40 of the draws."""
        share = -(-self.dataset_size // self.axis.size)
        return max(1, -(-_quantile(share, self.rate, _OVERFLOW) // self.capacity))

    def draw(self, step: int) -> list[list[int]]:
        """Global numbers of this rank's records in ``step``, dealt out to its ``micro_batches``, ascending.

        Raises OverflowError if there is no room, which happens with probability 2^-40 at most.
        """
        uniform = self.key.uniform(_NAME, step, self.own.start, self.own.stop, torch.device("cpu"))
        return self.dealt_out((uniform < self.rate).nonzero().flatten().add(self.own.start).tolist())

    def dealt_out(self, joined: list[int]) -> list[list[int]]:
        """Records in ``micro_batches`` parts of at most ``capacity``, the later ones maybe empty; or OverflowError.

        To leave records out instead would make one record's presence change another's.
        """
        room = self.micro_batches * self.capacity
        if len(joined) > room:
            raise OverflowError(
                f"got {len(joined)} records in one Poisson draw of a rank, wanted at most the {room} rows of"
                f" {self.micro_batches} micro-batches; raise the capacity"
            )
        return [joined[k * self.capacity : (k + 1) * self.capacity] for k in range(self.micro_batches)]


def refuse_wrap_around(dataset_size: int, world_size: int, drop_last: bool) -> None:
    """Raise ValueError if ``torch.utils.data.DistributedSampler`` would repeat records to make ranks equal."""
    if dataset_size % world_size and not drop_last:
        extra = -dataset_size % world_size
        raise ValueError(
            f"{dataset_size} records on {world_size} ranks: DistributedSampler repeats {extra} of them in an epoch, and"
            " a record that occurs twice in a step moves the sum by twice the clip norm; use drop_last=True or Poisson"
            " sampling"
        )


@cache
def _quantile(n: int, q: float, tail: float) -> int:
    """The smallest k with P(Binomial(n, q) > k) <= tail, by the exact probabilities."""
    if q == 1:
        return n
    above = 0.0
    for k in range(n, 0, -1):
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        above += math.exp(ways + k * math.log(q) + (n - k) * math.log1p(-q))
        if above > tail:
            return k
    return 0
