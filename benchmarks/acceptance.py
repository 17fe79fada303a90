"""How many drawn cases are proved exact, by layer family and dtype; what they are like; what a case costs.

``python -m benchmarks acceptance [N]``: N distinct cases of each clipping family, every trait but HSDP; and of each
arithmetic of low precision, with HSDP, by number of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import get_args

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters import load
from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import TrainingCase, Trait
from fsdpcheck.errors import NotExact
from fsdpcheck.judging import coverage_minimums
from fsdpcheck.oracle import certificate
from fsdpcheck.strategies.enumeration import distinct

_SPACES = {
    "plain": strategies.PLAIN, "unclipped": strategies.PRIVATE_UNCLIPPED, "exact": strategies.PRIVATE_EXACT,
    "probe": strategies.PRIVATE_PROBE,
}  # fmt: skip
_NARROW = {
    f"{compute}, {clipping}": strategies.LOW_PRECISION.but(clipping=(clipping,), compute=compute)
    for compute in ("bfloat16", "tf32")
    for clipping in ("none", "unclipped")
}
_NARROW_WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
_FAMILIES = (
    "float64", "float32", "surrogates", "conv", "group-norm", "rms-norm", "layer-norm", "attention", "bags", "tokens",
)  # fmt: skip


def report(count: int = 300) -> str:
    """A table a clipping family: accepted of drawn by layer family and dtype, floors, milliseconds of a case."""
    features = Features(
        frozenset(get_args(Promise)), frozenset(get_args(Trait)) - {"hsdp"}, factor=load("reference").features.factor
    )
    parts = [_family(name, strategies.cases_of(space, features), count) for name, space in _SPACES.items()]
    features = replace(features, accepts=features.accepts | {"hsdp"})
    parts += [
        _family(name, strategies.cases_of(space, features, _NARROW_WORLDS), count) for name, space in _NARROW.items()
    ]
    return "\n\n".join(parts)


def _family(name: str, strategy: object, count: int) -> str:
    clock = time.process_time
    began = clock()
    cases = distinct(strategy, count)  # type: ignore[arg-type]
    spent = Counter({"draw": clock() - began})  # type: ignore[dict-item]
    drawn, accepted, facts, why = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for case in cases:
        drawn.update(_labels(case))
        try:
            began = clock()
            answer = oracle.answer(case, load("reference").features.factor)
            answered = clock()
            certificate.prove(case, answer)
        except NotExact as error:
            why[str(error).split(", ")[-1].split(":")[0]] += 1
            continue
        spent.update({"oracle": answered - began, "proof": clock() - answered})  # type: ignore[dict-item]
        accepted.update(_labels(case))
        facts.update(fact for fact, holds in coverage_minimums.census(case).items() if holds and case.world_size > 1)
        facts["clips"] += any(bool((step.factors < 1).any()) for step in answer.steps)
        facts["gradient"] += any(bool(g.any()) for step in answer.steps for g in step.released.values())
        facts["W > 1"] += case.world_size > 1
    labels = ("all", *_FAMILIES, *(f"W={world}" for world in _NARROW_WORLDS))
    shares = ", ".join(f"{label} {accepted[label]}/{drawn[label]}" for label in labels if drawn[label])
    floor = ", ".join(f"{fact} {100 * facts[fact] / max(facts['W > 1'], 1):.0f} %" for fact in coverage_minimums.FLOORS)
    cost = ", ".join(f"{part} {1e3 * seconds / len(cases):.1f} ms" for part, seconds in spent.items())
    total = max(accepted["all"], 1)
    return (
        f"{name}: accepted {shares}\n  of those with W > 1: {floor}\n  a sample is clipped in"
        f" {100 * facts['clips'] / total:.0f} %, some gradient in {100 * facts['gradient'] / total:.0f} %\n"
        f"  cost of a case: {cost}\n  rejected for: {dict(why) or 'nothing'}"
    )


def _labels(case: TrainingCase) -> list[str]:
    traits = {trait.removesuffix("-private") for trait in case.requires()}
    world = [] if case.arithmetic.compute == "dtype" else [f"W={case.world_size}"]
    return ["all", case.arithmetic.dtype, *world, *(family for family in _FAMILIES[2:] if family in traits)]
