"""What an adapter may offer beside training: the sampler that feeds its ranks, and kernels that compute norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fsdpcheck.adapters.contract import Adapter
from fsdpcheck.case import MeshSpec
from fsdpcheck.case.sampler import SamplingSpec

Kernel = Callable[[Tensor, Tensor], Tensor]
"""(activations [B, T, d], backprops [B, T, p]) -> squared norms [B] of the per-sample gradients of a Linear's weight.

Any strides. The result is float32, or float64 if an input is."""


@dataclass(frozen=True)
class SamplerSetup:
    """All that ``Sampling.sampler`` may know. ``seed`` is equal on all ranks; another gives other orders and draws."""

    rank: int
    world_size: int
    mesh: MeshSpec
    sampling: SamplingSpec
    seed: int


@dataclass(frozen=True)
class Drawn:
    """What one rank takes in one step: global numbers of records, by micro-batch; empty ones count.

    ``repeats``: which of them are there only to make shares equally long; None: the sampler does not say.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    repeats: tuple[int, ...] | None = None

    @property
    def records(self) -> tuple[int, ...]:
        """The records of all micro-batches, in their order."""
        return tuple(record for chunk in self.micro_batches for record in chunk)


class Sampler(Protocol):
    """What deals records out to one rank."""

    def steps(self, epoch: int, start: int = 0) -> Iterable[Drawn]:
        """The steps of epoch ``epoch`` (from 0) from step ``start`` on, as a training gets them that goes on there.

        Epochs are asked for in ascending order, or one of a new sampler. Whatever a training loop would have to call
        between epochs (``set_epoch``) is called here. Ranks call it together, so it may communicate.
        """


class Sampling(Adapter, Protocol):
    """What an adapter that promises "epochs" or "poisson" has besides."""

    def sampler(self, setup: SamplerSetup) -> Sampler:
        """What deals records out to this rank. Called on every rank."""


@dataclass(frozen=True)
class EngineSetup:
    """All that ``Engine.engine`` may know. ``records``: how many the data set has that the training is built on.

    Everything else is public, and decided before: ``size``, a number of records that no data set exceeds; ``rate``,
    with which probability each joins a step; ``steps``; ``batch_size``, rows of a micro-batch at most. ``seed`` is
    equal on all ranks.
    """

    rank: int
    world_size: int
    mesh: MeshSpec
    records: int
    size: int
    rate: float
    steps: int
    batch_size: int
    seed: int


class Engine(Adapter, Protocol):
    """What an adapter that promises "engine" has besides."""

    def engine(self, setup: EngineSetup) -> Mapping[str, float | int | str]:
        """Build a training on a data set of ``setup.records`` records as its user does, and say all that shows of it.

        By name, read off what was built: "divisor", "steps", "rate" and "learning_rate" at least, and whatever else
        somebody sees who sees no record. Called on every rank.
        """


class Kernels(Adapter, Protocol):
    """What an adapter that promises "kernels" has besides."""

    def kernels(self) -> Mapping[str, Kernel]:
        """By name. Called in a process of its own, in which Triton, if anything imports it, is interpreted."""
