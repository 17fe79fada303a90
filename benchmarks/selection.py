"""Selection: what ten cases that were chosen of sixty kill and cost, beside ten and fifteen as they were drawn.

``python -m benchmarks selection [GLOB]``: for each pair of a planted fault and a law that is said to catch it (fault
names that match), whether any case of an arm kills the fault, and for each law and adapter what all cases of the arm
cost without a fault. Without one every case must hold, in each arm; an arm whose cases are another's is an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from benchmarks.witnesses import wanted
from fsdpcheck.case import Case
from fsdpcheck.case.profiles import PROFILES, WORLD_SIZES
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl.faults._fault import Fault
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.drawing import Batch
from fsdpcheck.judging.exploration import cases_of, seed_of, sizes_for
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.run import _proved as proved


@dataclass
class _Arm:
    """``first`` of ``drawn`` cases, chosen where that is fewer; ``seed`` keeps arms that choose nothing apart."""

    words: str
    first: int
    drawn: int
    seed: int
    killed: int = 0
    seconds: float = 0.0
    cases: dict[tuple[str, str], tuple[Case, ...]] = field(default_factory=dict)

    def draw(self, law: Law, run: Run) -> None:
        """The cases of a law on an adapter; all of them hold, and what they cost is added."""
        strategy = cases_of(law, run, sizes_for(law, WORLD_SIZES["quick"], run.features.max_world_size))
        batch = Batch(strategy, self.drawn, seed_of(law.space.drawn.key, self.seed), self.first)
        check_case(law, run, batch.draw().cases[0], diagnose=False)  # starts processes
        proved.cache_clear()
        begun, cases = _seconds(), []
        for case in batch.draw().cases[: self.first]:
            status = check_case(law, run, case, diagnose=False).status
            assert status in ("holds", "no case"), f"{law.name} on {run.adapter_ref}: {status} without a fault"
            cases += [case] if status == "holds" else []
        self.seconds += _seconds() - begun
        self.cases[law.name, run.adapter_ref] = tuple(cases)

    def judge(self, law: Law, fault: Fault, engine: SimulatedEngine) -> None:
        """Whether one of the cases kills the fault."""
        run = Run(engine, fault.subject, installs=(f"fsdpcheck.impl.faults:{fault.name}",))
        for case in self.cases[law.name, fault.subject]:
            finding = check_case(law, run, case, diagnose=False).finding
            if finding is not None and finding.kind != "raised":
                self.killed += 1
                return


def _seconds() -> float:
    """Wall-clock: ranks are in another process, and this one waits for them."""
    return time.perf_counter()


def lines(glob: str = "*") -> Iterator[str]:
    """A line a law and adapter as it is done, then a table."""
    quick = PROFILES["quick"]
    arms = [_Arm(f"{quick} chosen of 60", quick, 60, 0)]
    others = ((quick, 1), (15, 1), (15, 2))
    arms += [_Arm(f"{count} as drawn, seed {seed}", count, count, seed) for count, seed in others]
    pairs = {
        (law.name, fault.name): (law, fault)
        for _, found in wanted()
        for law, fault in found
        if fnmatchcase(fault.name, glob)
    }
    subjects = dict.fromkeys((name, fault.subject) for (name, _), (_, fault) in pairs.items())
    engine = SimulatedEngine()
    try:
        for number, (name, subject) in enumerate(subjects):
            here = [pair for pair in pairs.values() if (pair[0].name, pair[1].subject) == (name, subject)]
            for arm in arms:
                arm.draw(here[0][0], Run(engine, subject))
                for law, fault in here:
                    arm.judge(law, fault, engine)
            yield f"[{number + 1}/{len(subjects)}] {name} on {subject}"
    finally:
        engine.close()
    for arm in arms[1:]:
        assert arm.cases != arms[0].cases, f"{arm.words} are the cases of {arms[0].words}"
    yield "| cases | pairs killed | seconds without a fault |"
    yield "|---|---|---|"
    yield from (f"| {arm.words} | {arm.killed} of {len(pairs)} | {arm.seconds:.0f} |" for arm in arms)
