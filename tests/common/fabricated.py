"""Executions made up from an answer, right or with one thing edited: checks and diagnoses are tested without ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks._read import local_rows, pick
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.execution.trace import Collective
from fsdpcheck.oracle import Answer, Named
from tests.common.later import later

SMALL = TrainingCase(
    model=ModelSpec((LayerSpec(5, bias=True, activation="relu"), LayerSpec(3, bias=True)), features=4, units=(1, 1)),
    mesh=MeshSpec(3),
    layout=BatchLayout("strided", 7),
    step=StepSpec(steps=2, micro_batches=2, normaliser=8),
    arithmetic=Arithmetic("float64", weights=2, inputs=3),
    seed=4,
)
"""Two layers on three ranks holding 3, 2 and 2 of seven samples; two steps of plain training."""


def clipped(clipping: str, case: TrainingCase = SMALL, **changes: object) -> TrainingCase:
    """``case`` in another clipping family."""
    step = replace(case.step, clipping=clipping, **{"clip_norm": 16, **changes})  # type: ignore[arg-type]
    return replace(case, step=step)


def execution(answer: Answer) -> Execution:
    """What a perfect implementation would have shown, everything observed, one all-reduce a step."""
    case = answer.case
    ranks = [RankResult(rank, dict(answer.steps[0].before)) for rank in range(case.world_size)]
    group = tuple(range(case.world_size))
    for result in ranks:
        for k, step in enumerate(answer.steps):
            rows = local_rows(case, k, result.rank, step.samples)
            record = StepRecord({name: value.clone() for name, value in step.after.items()})
            record.grads = {name: value.clone() for name, value in step.used.items()}
            record.norms, record.factors = pick(step.norms, rows).clone(), pick(step.factors, rows).clone()
            record.grad_norm = step.grad_norm.clone()
            result.steps.append(record)
        result.trace = tuple(
            Collective("all_reduce", group, "world", k, "sum", inputs=(("float64", (k + 1,)),))
            for k in range(len(answer.steps))
        )
    return Execution("made up", RunRequest(case, "made up"), ranks)


def weighted(answer: Answer, weights: Tensor, step: int = 0) -> Named:
    """The released gradient that per-sample weights [n] would give, case dtype."""
    wanted = answer.steps[step]
    return {
        name: torch.tensordot(weights.double(), gradient, dims=1).to(wanted.used[name].dtype)
        for name, gradient in wanted.gradients.items()
    }


def with_gradient(answer: Answer, gradient: Named, step: int = 0) -> Execution:
    """An execution in which all ranks released ``gradient`` at ``step`` and updated with it (first step only)."""
    made = execution(answer)
    for result in made.ranks:
        result.steps[step].grads = {name: value.clone() for name, value in gradient.items()}
        result.steps[step].params = oracle.update(answer.case, answer.steps[step].before, gradient)
    return made


def right_weights(answer: Answer, step: int = 0) -> Tensor:
    """factor * multiplicity / N, [n] float64."""
    wanted = answer.steps[step]
    counts = torch.tensor(wanted.multiplicity, dtype=torch.float64)
    return wanted.factors.double() * counts / answer.case.step.normaliser


WEIGHT = "units.0.linear0.weight"
NESTED = FactorRule(eps=1e-6, expression="reciprocal", nested=True)
GLOBAL = replace(SMALL, step=replace(SMALL.step, max_grad_norm=0.5))
PLAIN = later(SMALL)
EXACT = later(clipped("exact"), FactorRule(eps=1e-6))
PROBE = later(clipped("probe"), FactorRule(eps=1e-6))
PROBE_NESTED = later(clipped("probe"), NESTED)
CLIPPED = later(GLOBAL)
