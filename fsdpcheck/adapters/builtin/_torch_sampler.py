"""``torch.utils.data.DistributedSampler``, as a training loop uses it: set_epoch, then batches of its list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import BatchSampler, DistributedSampler

from fsdpcheck.adapters.capabilities import Drawn, SamplerSetup
from fsdpcheck.case.sampler import share_count, share_of


class Shares:
    """One micro-batch a step. It does not say which entries repeat a record."""

    def __init__(self, setup: SamplerSetup) -> None:
        spec, mesh = setup.sampling, setup.mesh
        self._sampler: DistributedSampler[int] = DistributedSampler(
            range(spec.records),  # type: ignore[arg-type]  # all it asks a data set for is its length
            num_replicas=share_count(spec, mesh),
            rank=share_of(spec, mesh, setup.rank),
            shuffle=spec.shuffle,
            seed=setup.seed,
            drop_last=spec.drop_last,
        )
        self._batch_size = spec.batch_size

    def steps(self, epoch: int, start: int = 0) -> Iterator[Drawn]:
        self._sampler.set_epoch(epoch)
        for batch in islice(BatchSampler(self._sampler, self._batch_size, drop_last=False), start, None):
            yield Drawn((tuple(batch),))
