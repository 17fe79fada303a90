"""Stories of right steps: the first wrong quantity is looked for where nothing is wrong; each that is named is false.

``python -m benchmarks stories [ADAPTERS [LAWS [N [SEED]]]]``: of each law that trains a model and that an honest
adapter promises, N distinct cases (20). A line a pair as it is done, then the sums. Exits with 1 if anything was named.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from fsdpcheck.adapters import load
from fsdpcheck.adapters.contract import WITHOUT_MODEL
from fsdpcheck.case import TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact, Refused
from fsdpcheck.judging.first_wrong import first_wrong
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration

HONEST: Final = (
    "reference", "reference_fsdp2", "reference:bookkeeping", "fully_shard", "fsdp1", "ddp", "zero_redundancy",
    "tensor_parallel", "sequence_parallel", "pipeline", "pipeline:one_f_one_b", "ddp:finding_unused",
)  # fmt: skip
"""Adapters of which all laws hold."""


def lines(adapters: str = "*", laws: str = "*", count: int = 20, seed: int = 0) -> Iterator[str]:
    """A line a pair of adapter and law, what was named, and the sums."""
    engine, cases, named = SimulatedEngine(), 0, 0
    try:
        for adapter in (one for one in HONEST if fnmatchcase(one, adapters)):
            for law in _of(adapter, laws):
                looked_at, told = stories(engine, adapter, law.name, count, seed)
                cases, named = cases + looked_at, named + len(told)
                yield f"{adapter} {law.name}: {looked_at} cases looked at, {len(told)} named as wrong"
                yield from told
    finally:
        engine.close()
    yield f"{cases} right cases looked at, a first wrong quantity named in {named}"
    if named:
        raise SystemExit(1)


def _of(adapter: str, laws: str) -> list[Law]:
    """Laws that draw cases which train, and that the adapter promises; none that it may refuse."""
    features = load(adapter).features
    found = [law for name, law in chapters().items() if fnmatchcase(name, laws) and not law.space.added]
    return [
        law
        for law in found
        if law.promise not in WITHOUT_MODEL and not (law.on_real_ranks or law.not_promised(features))
    ]


def stories(engine: Engine, adapter: str, law: str, count: int, seed: int) -> tuple[int, list[str]]:
    """(cases that were looked at, what was said to be wrong in one)."""
    run, looked_at, told = Run(engine, adapter), 0, []
    for case in enumeration.distinct(chapters()[law].draw(run.features, (1, 2, 3, 4)), count, seed):
        if not isinstance(case, TrainingCase):
            continue
        try:
            found = first_wrong(run, case)
        except (NotExact, Refused):
            continue
        looked_at += found.text.startswith("right")
        if found.place or found.text.startswith("the first"):
            told.append(f"{case.describe()}\n{found.text}")
    return looked_at, told
