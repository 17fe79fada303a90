"""Epochs: a data set dealt out to ranks in shares of equal length, in steps that are equally many on all ranks.

Entry k of an epoch's order goes to share k mod P, and a share is taken ``batch_size`` entries a step, the last step
maybe fewer. The order of an epoch is a function of (key, epoch): ranks agree on it without a message, and to go on
after a stop it is enough to know epoch and step. Where P does not divide the number of records, the last ones are left
out (``drop_last``) or the first ones are taken again; those entries are marked, because a record that occurs twice
moves a clipped sum by twice the clip norm.

Legend: D records, P shares. Source: torch.utils.data.DistributedSampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..clipping.batch_layout import DISTRIBUTED, Layouts
from ..noise.gaussian import Noise
from ..sharding.collectives import ALONE, Axis

_NAME = "(the order of an epoch)"


@dataclass(frozen=True)
class Local:
    """One step of one rank: records, and which of them are there only to make shares equally long."""

    records: tuple[int, ...]
    repeats: tuple[int, ...]


@dataclass(frozen=True)
class EpochSampler:
    """Deals ``dataset_size`` records out over ``axis`` and ``replicas`` as ``layouts`` says.

    ``key`` is a ``noise.Noise`` of its own, equal on all ranks; without ``shuffle`` it is not used.
    """

    dataset_size: int
    batch_size: int
    key: Noise
    layouts: Layouts = DISTRIBUTED
    axis: Axis = ALONE
    replicas: Axis = ALONE
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        if not (self.dataset_size > 0 and self.batch_size > 0):
            raise ValueError(f"got {self.dataset_size} records, {self.batch_size} a step; wanted positive numbers")

    def order(self, epoch: int) -> list[int]:
        """All records in the order of an epoch."""
        if not self.shuffle:
            return list(range(self.dataset_size))
        hashed = self.key.uniform(_NAME, epoch, 0, self.dataset_size, torch.device("cpu"))
        return hashed.argsort(stable=True).tolist()

    def share(self, epoch: int) -> list[tuple[int, bool]]:
        """(record, whether it is a repetition) of all entries of this rank's share."""
        order, (number, count) = self.order(epoch), self.layouts.share(self.axis, self.replicas)
        length = len(order) // count if self.drop_last else -(-len(order) // count)
        places = range(number, length * count, count)
        return [(order[place % len(order)], place >= len(order)) for place in places]

    def steps(self, epoch: int, start: int = 0) -> Iterator[Local]:
        """The steps of an epoch from ``start`` on; equally many on all ranks."""
        share = self.share(epoch)
        for first in range(start * self.batch_size, len(share), self.batch_size):
            entries = share[first : first + self.batch_size]
            yield Local(tuple(record for record, _ in entries), tuple(record for record, again in entries if again))
