"""Several steps: are cases still equal bit for bit at step 6? By optimizer, adapter and world size; ragged batches.

``python -m benchmarks steps [N]``: N drawn models for each. "kept" leaves the parameters as the optimizer left them
instead of projecting what was recorded: the share of cases whose proof still holds then, by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters import load
from fsdpcheck.case import BatchLayout, MeshSpec, OptimizerSpec, TrainingCase
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import certificate
from fsdpcheck.strategies.enumeration import distinct

STEPS = 6
_OPTIMIZERS = {
    "sgd": OptimizerSpec(lr_exponent=1), "momentum": OptimizerSpec(lr_exponent=1, momentum=0.5),
    "weight decay": OptimizerSpec(lr_exponent=2, weight_decay=0.5), "adam": OptimizerSpec("adam", 2),
    "adamw": OptimizerSpec("adamw", 2, weight_decay=0.5), "halving": OptimizerSpec("adamw", 1, schedule="halving"),
}  # fmt: skip
_LAYOUTS = {2: (3, 0), 3: (2, 0, 3), 4: (1, 3, 0, 2)}


def report(count: int = 20) -> str:
    """A line an adapter and optimizer: cases equal at every one of six steps, of those the proof accepts."""
    engine = SimulatedEngine()
    lines = [
        _projected(Run(engine, name), kind, count) for name in ("reference", "fully_shard") for kind in _OPTIMIZERS
    ]
    engine.close()
    return "\n".join([*lines, *(_kept(kind, count) for kind in _OPTIMIZERS)])


def _projected(run: Run, kind: str, count: int) -> str:
    tally: Counter[str] = Counter()
    for case in _models(kind, count):
        try:
            run.answer(case)
        except NotExact:
            tally["rejected"] += 1
            continue
        tally["judged"] += 1
        try:
            assert_parameters_equal(run(case), run.answer(case))
            tally["equal"] += 1
        except Violation as violation:
            print(violation)
    told = f"{tally['equal']} of {tally['judged']} equal at step {STEPS}, {tally['rejected']} rejected"
    return f"{run.adapter_ref}, {kind}: {told}"


def _kept(kind: str, count: int) -> str:
    reached = Counter[int]()
    cases = [replace(case, arithmetic=replace(case.arithmetic, project=False)) for case in _models(kind, count)]
    for case in cases:
        for steps in range(1, STEPS + 1):
            shorter = replace(case, step=replace(case.step, steps=steps))
            try:
                certificate.prove(shorter, oracle.answer(shorter))
            except NotExact:
                break
            reached[steps] += 1
    shares = " / ".join(f"{100 * reached[steps] / len(cases):.0f}" for steps in range(1, STEPS + 1))
    return f"kept on no grid, {kind}: proved exact up to step 1 .. {STEPS}: {shares} %"


def _models(kind: str, count: int) -> Iterator[TrainingCase]:
    """Drawn models and losses, float64, on each number of ranks with a ragged batch and an empty rank."""
    features = load("fully_shard").features
    plain = replace(features, accepts=features.accepts - {"mean", "float32", "hsdp", "premultiply", "resume"})
    for case in distinct(strategies.cases_of(strategies.PLAIN, plain, (2,)), count):
        for world, counts in _LAYOUTS.items():
            step = replace(case.step, steps=STEPS, optimizer=_OPTIMIZERS[kind], normaliser=4, micro_batches=1)
            yield replace(
                case,
                mesh=MeshSpec(world),
                layout=BatchLayout("ragged", sum(counts), counts=counts),
                step=step,
                arithmetic=replace(case.arithmetic, project=True),
            )
