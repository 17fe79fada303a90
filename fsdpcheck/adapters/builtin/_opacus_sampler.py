"""Opacus' Poisson sampler of several ranks, as ``DPDataLoader`` makes it; needs the extra ``fsdpcheck[opacus]``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from opacus.utils.uniform_sampler import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    DistributedUniformWithReplacementSampler,
)
from torch import Tensor

from fsdpcheck.adapters.capabilities import Drawn, SamplerSetup


class Poisson:
    """One micro-batch a step. It knows no way to go on at a later step but to draw what comes before it.

    ``alike``: every rank's generator has the seed itself, as ``torch.manual_seed`` gives it; otherwise one of its own.
    ``repaired``: steps in which the rank draws no record are put back, so that they hide no other finding.
    """

    def __init__(self, setup: SamplerSetup, alike: bool, repaired: bool) -> None:
        spec, self._repaired = setup.sampling, repaired
        generator = torch.Generator()
        generator.manual_seed(setup.seed if alike else setup.seed * setup.world_size + setup.rank)
        self._steps = spec.steps
        self._sampler: Any = DistributedUniformWithReplacementSampler(
            total_size=spec.records, sample_rate=spec.rate, steps=1 if repaired else spec.steps, generator=generator
        )

    def steps(self, epoch: int, start: int = 0) -> Iterator[Drawn]:
        self._sampler.set_epoch(epoch)
        for records in islice(self._drawn(), start, None):
            yield Drawn((tuple(records.tolist()),))

    def _drawn(self) -> Iterator[Tensor]:
        if not self._repaired:
            yield from self._sampler
            return
        for _ in range(self._steps):
            yield next(iter(self._sampler), torch.empty(0, dtype=torch.int64))
