"""The samplers of the reference implementation, behind the adapter protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fsdpcheck.adapters.capabilities import Drawn, EngineSetup, SamplerSetup

if TYPE_CHECKING:
    from fsdpcheck.impl.clipping.batch_layout import Layouts
    from fsdpcheck.impl.sampling.epochs import EpochSampler
    from fsdpcheck.impl.sampling.poisson import PoissonSampler
    from fsdpcheck.impl.sharding.collectives import Axis


class Shares:
    """``impl.epochs.EpochSampler``: one micro-batch a step."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler

    def steps(self, epoch: int, start: int = 0) -> Iterator[Drawn]:
        for local in self._sampler.steps(epoch, start):
            yield Drawn((local.records,), local.repeats)


class Poisson:
    """``impl.sampling.PoissonSampler``: steps are numbered through all epochs."""

    def __init__(self, sampler: PoissonSampler, steps: int) -> None:
        self._sampler, self._steps = sampler, steps

    def steps(self, epoch: int, start: int = 0) -> Iterator[Drawn]:
        for step in range(start, self._steps):
            yield Drawn(tuple(map(tuple, self._sampler.draw(epoch * self._steps + step))))


def sampler(setup: SamplerSetup) -> Shares | Poisson:
    """The sampler that a case asks for, under a key made from its seed."""
    from fsdpcheck.impl.noise import gaussian
    from fsdpcheck.impl.sampling import epochs, poisson
    from fsdpcheck.impl.sharding.collectives import Axis

    spec, key = setup.sampling, gaussian.seeded(setup.seed)
    layouts, axis, replicas = _layouts(setup)
    if spec.kind == "poisson":
        share = Axis(None, *layouts.share(axis, replicas))
        return Poisson(poisson.PoissonSampler(spec.records, spec.rate, spec.batch_size, key, share), spec.steps)
    options = (spec.shuffle, spec.drop_last)
    return Shares(epochs.EpochSampler(spec.records, spec.batch_size, key, layouts, axis, replicas, *options))


def _layouts(setup: SamplerSetup) -> tuple[Layouts, Axis, Axis]:
    """Layouts over both axes of the mesh, and this rank's place on them; samplers need no process group."""
    from fsdpcheck.impl.clipping.batch_layout import Layouts
    from fsdpcheck.impl.sharding.collectives import Axis

    replica, place = divmod(setup.rank, setup.mesh.dp_shard)
    layouts = Layouts(setup.sampling.shards, setup.sampling.replicas)
    return layouts, Axis(None, place, setup.mesh.dp_shard), Axis(None, replica, setup.mesh.dp_replicate)


def public(setup: EngineSetup) -> Mapping[str, float | int | str]:
    """What shows of a training on a data set of ``setup.records`` records, read off what it is built of."""
    from fsdpcheck.impl.accounting import Draws, Plan
    from fsdpcheck.impl.noise import gaussian
    from fsdpcheck.impl.sharding.collectives import Axis
    from fsdpcheck.impl.trainer import Options

    plan = Plan(setup.size, setup.rate, setup.steps, setup.batch_size, learning_rate=0.5)
    draws = Draws(plan, setup.records, gaussian.seeded(setup.seed), Axis(None, setup.rank, setup.world_size))
    options = Options(draws.plan.normaliser, rate=draws.sampler.rate)
    sizes = {len(draws.draw(step)) for step in range(setup.steps)}
    return {
        "divisor": options.normaliser,
        "steps": draws.plan.steps,
        "rate": options.rate,
        "learning_rate": draws.plan.learning_rate,
        "micro-batches": ", ".join(map(str, sorted(sizes))),
    }
