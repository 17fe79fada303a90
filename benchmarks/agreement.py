"""Do runs agree? N drawn cases run twice, under the reversed schedule, and on real gloo processes; bits and traces.

``python -m benchmarks schedules [N]`` and ``processes [N]``. Prints how many agreed and each case that did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from fsdpcheck import strategies
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.training import assert_same_execution
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies.enumeration import distinct

_PRIVATE = (strategies.PLAIN, strategies.PRIVATE_EXACT, strategies.PRIVATE_UNCLIPPED)
_FAMILIES: Final[dict[str, tuple[strategies.CaseSpace, ...]]] = {
    "reference": _PRIVATE,
    "reference_fsdp2": _PRIVATE,
    **dict.fromkeys(
        ("fully_shard", "fsdp1", "ddp", "zero_redundancy", "tensor_parallel", "sequence_parallel", "pipeline"),
        (strategies.PLAIN,),
    ),
}
"""Only families whose sums are exact. A global norm adds up squares of which some are rounded, so that its last bit
depends on the order of the backend's sum; probe factors are rounded too."""


def schedules(count: int = 100) -> str:
    """Each case run twice forward and once reversed: are the three equal in every recorded bit and every trace?"""
    engine = SimulatedEngine()

    def disagrees(run: Run, case: TrainingCase) -> bool:
        first, again, turned = run(case), run(case), run(case, schedule="reversed")
        return _differ(first, again) or _differ(first, turned)

    text = _study(engine, count, disagrees, "run twice and reversed")
    engine.close()
    return text


def processes(count: int = 100) -> str:
    """Each case simulated and on gloo processes: are the two equal in every recorded bit and every trace?"""
    engine, real = SimulatedEngine(), ProcessesEngine()
    text = _study(engine, count, lambda run, case: _differ(run(case), run.on(real)(case)), "simulated against gloo")
    engine.close()
    real.close()
    return text


def _differ(one: object, other: object) -> bool:
    try:
        assert_same_execution(one, other)  # type: ignore[arg-type]
    except Violation as violation:
        print(violation)
        return True
    return False


def _study(engine: SimulatedEngine, count: int, disagrees: Callable[[Run, TrainingCase], bool], title: str) -> str:
    judged, wrong, rejected, by_adapter = 0, 0, 0, Counter[str]()
    for run, case in _drawn(engine, count):
        try:
            differs = disagrees(run, case)
        except NotExact:
            rejected += 1
            continue
        judged += 1
        by_adapter[run.adapter_ref] += 1
        if differs:
            wrong += 1
            print(f"{run.adapter_ref}: {case.describe()}\n{case.to_json()}")
    each = ", ".join(f"{name} {cases}" for name, cases in by_adapter.items())
    return f"{title}: {judged - wrong} of {judged} cases agree in every bit and trace ({rejected} rejected; {each})"


def _drawn(engine: SimulatedEngine, count: int) -> Iterator[tuple[Run, TrainingCase]]:
    """``count`` distinct cases, spread evenly over adapters and families; the same every time."""
    kinds = [(name, space) for name, spaces in _FAMILIES.items() for space in spaces]
    for number, (name, space) in enumerate(kinds):
        share = count // len(kinds) + (number < count % len(kinds))
        run = Run(engine, name)
        run = run.watching(run.features.observables & {"grads"})
        for case in distinct(strategies.cases_of(space, run.features, (2, 3, 4)), share):
            yield run, case
