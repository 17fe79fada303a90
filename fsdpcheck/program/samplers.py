"""What every rank runs in a case of a sampler: make it, take its steps, write down what was drawn."""

from __future__ import annotations

from typing import Any, cast

from fsdpcheck.adapters.capabilities import Drawn, Engine, EngineSetup, Sampler, SamplerSetup, Sampling
from fsdpcheck.adapters.contract import Adapter
from fsdpcheck.case import SamplerCase
from fsdpcheck.case.sampler import SamplingSpec
from fsdpcheck.errors import AdapterError, explain
from fsdpcheck.execution import RankResult

ENGINE = "engine"
"""Who observed ("engine", "built", 0, what is public by name)."""
NEEDED = ("divisor", "steps", "rate", "learning_rate")
"""What of it no adapter may leave out."""
SAMPLER = "sampler"
"""Who observed ("sampler", "epoch", epoch, the list of ``Drawn`` of its steps)."""


def draw(case: SamplerCase, adapter: Adapter, rank: int, result: RankResult) -> None:
    """Add an observation for each epoch. Epochs that begin at a later step are those of a sampler made anew.

    Raises whatever the sampler raises, and AdapterError for what breaks the adapter protocol.
    """
    spec = case.sampling
    setup = SamplerSetup(rank, case.world_size, case.mesh, spec, case.seed)
    sampler = _sampler(adapter, setup)
    for epoch in range(spec.epochs):
        if spec.start:
            sampler = _sampler(adapter, setup)
        drawn = [_checked(step, adapter, spec) for step in sampler.steps(epoch, spec.start)]
        result.observations.append((SAMPLER, "epoch", epoch, drawn))


def build(records: int, case: SamplerCase, adapter: Adapter, rank: int, result: RankResult) -> None:
    """Add an observation of what is public of a training that is built on ``records`` records.

    Raises AdapterError for what is no such account.
    """
    spec = case.sampling
    setup = EngineSetup(
        rank, case.world_size, case.mesh, records, spec.records, spec.rate, spec.steps, spec.batch_size, case.seed
    )
    public = dict(cast(Engine, adapter).engine(setup))
    if missing := sorted({*NEEDED} - public.keys()):
        what = f"the engine of adapter {adapter.name!r} does not say all that is public"
        raise AdapterError(
            explain(what, got=f"nothing of {', '.join(missing)}", wanted=", ".join(NEEDED), then="add them")
        )
    result.observations.append((ENGINE, "built", 0, public))


def _sampler(adapter: Adapter, setup: SamplerSetup) -> Sampler:
    return cast(Sampling, adapter).sampler(setup)


def _checked(step: Any, adapter: Adapter, spec: SamplingSpec) -> Drawn:
    """A step whose entries are records, or AdapterError: numbers out of range would be some other mistake's guise."""
    if isinstance(step, Drawn):
        entries = [*step.records, *(step.repeats or ())]
        if all(type(entry) is int and 0 <= entry < spec.records for entry in entries):
            return step
    what = f"the sampler of adapter {adapter.name!r} gave a step that is none"
    wanted = f"Drawn(micro_batches, repeats) of ints from 0 to {spec.records - 1}"
    raise AdapterError(explain(what, got=str(step)[:200], wanted=wanted, then="turn tensors into ints (tolist)"))
