"""What part of the space of cases the laws reach, and how small a failing case becomes.

``python -m benchmarks coverage [N]``: the cases that the laws draw for the reference with N cases a law (default: those
of the profile "ci"): the share that has each fact, pairs of facts met together, ratios of rows to ranks, clip regimes.
``python -m benchmarks shrunk [SEED]``: for every planted fault the minimal case of the first law that is said to catch
it, and the medians over all of them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import combinations

from fsdpcheck import oracle
from fsdpcheck.adapters import load
from fsdpcheck.adapters.contract import WITHOUT_MODEL
from fsdpcheck.case import TrainingCase
from fsdpcheck.case.profiles import PROFILES, WORLD_SIZES
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.tokens import decode
from fsdpcheck.impl import faults
from fsdpcheck.judging import coverage_minimums
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies.enumeration import distinct
from fsdpcheck.workload import models


def report(count: int = PROFILES["ci"]) -> str:
    """The table of facts, pairs, ratios and regimes."""
    features = load("reference").features
    cases: set[TrainingCase] = set()
    for law in chapters().values():
        if law.promise not in WITHOUT_MODEL and not law.not_promised(features):
            cases.update(distinct(law.draw(features, WORLD_SIZES["ci"]), count))
    facts, pairs, ratios, regimes = Counter[str](), Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    for case in cases:
        holding = sorted(fact for fact, holds in coverage_minimums.census(case).items() if holds)
        facts.update(holding)
        pairs.update(combinations(holding, 2))
        ratios[_ratio(case)] += 1
        regimes[_regime(case)] += 1
    every = sorted(coverage_minimums.census(next(iter(cases))))
    possible = len(every) * (len(every) - 1) // 2
    lines = [f"{len(cases)} distinct cases of {len(chapters())} laws, {count} each at most"]
    several = [case for case in cases if case.world_size > 1]
    on_several = Counter(fact for case in several for fact, holds in coverage_minimums.census(case).items() if holds)
    lines += [
        f"  {fact:<26} {100 * facts[fact] / len(cases):5.1f} %{_floor(fact, on_several, len(several))}"
        for fact in every
    ]
    met = [fact for fact in every if facts[fact]]
    among = len(met) * (len(met) - 1) // 2
    lines.append(f"pairs of facts met together: {len(pairs)} of {possible}, of {among} without facts that no case has")
    lines.append(f"no case has: {', '.join(fact for fact in every if not facts[fact]) or '-'}")
    never = [f"{one} + {other}" for one, other in combinations(met, 2) if (one, other) not in pairs]
    lines.append(f"never: {'; '.join(never) or '-'}")
    for title, counted in (("rows of a step to ranks", ratios), ("clip regimes", regimes)):
        shares = ", ".join(f"{name} {100 * n / len(cases):.1f} %" for name, n in counted.most_common())
        lines.append(f"{title}: {shares}")
    return "\n".join(lines)


def _floor(fact: str, found: Counter[str], cases: int) -> str:
    least = coverage_minimums.FLOORS.get(fact)
    return "" if least is None else f", on several ranks {100 * found[fact] / cases:.1f} %, floor {100 * least:.0f} %"


def _ratio(case: TrainingCase) -> str:
    rows, ranks = case.layout.batch_size, case.world_size
    if ranks == 1:
        return "one rank"
    return "fewer" if rows < ranks else "equal" if rows == ranks else "multiple" if rows % ranks == 0 else "uneven"


def _regime(case: TrainingCase) -> str:
    """Which samples a case clips, by its answer."""
    if not case.step.private:
        return "plain"
    try:
        steps = oracle.answer(case, load("reference").features.factor).steps
    except NotExact:
        return f"{case.step.clipping}: without an exact answer"
    clipped = [bool(factor < 1) for step in steps for factor in step.factors.flatten()]
    kind = "no sample" if not any(clipped) else "all samples" if all(clipped) else "some samples"
    return f"{case.step.clipping}: {kind}"


def shrunk(seed: int = 0) -> Iterator[str]:
    """A line a fault, and the medians."""
    engine = SimulatedEngine()
    sizes: list[tuple[int, ...]] = []
    for fault in faults.ALL.values():
        law = next(law for name, law in chapters().items() if fnmatch(name, fault.caught_by))
        if law.promise in WITHOUT_MODEL:
            continue
        run = Run(engine, fault.subject, installs=(f"fsdpcheck.impl.faults:{fault.name}",))
        finding = check_law(law, run, "ci", seed=seed).finding
        if finding is None:
            yield f"{fault.name}: {law.name} did not catch it in these cases"
            continue
        sizes.append(_size(decode(finding.token).case))
        yield f"{fault.name}: {law.name}: {_words(sizes[-1])}"
    engine.close()
    columns = list(zip(*sizes, strict=True))
    yield f"median of {len(sizes)}: {_words(tuple(int(statistics.median(column)) for column in columns))}"
    yield f"largest of each: {_words(tuple(map(max, columns)))}"


def _size(case: TrainingCase) -> tuple[int, ...]:
    """(layers, numbers in parameters, ranks, samples of a step, steps, micro-batches)."""
    numbers = sum(p.numel() for name, p in models.build(case).named_parameters() if name != oracle.INSTRUMENT)
    return (
        len(case.model.layers), numbers, case.world_size, case.layout.batch_size, case.step.steps,
        case.step.micro_batches,
    )  # fmt: skip


def _words(size: tuple[int, ...]) -> str:
    names = ("layers", "parameter elements", "ranks", "samples", "steps", "micro-batches")
    return ", ".join(f"{n} {name}" for n, name in zip(size, names, strict=True))
