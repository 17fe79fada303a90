"""Causes of a wrong global gradient norm, and of a wrong update that it clips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import shards
from fsdpcheck.diagnosis.cause_fit import by_ratio, fits, fitting
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.oracle import Answer, Named, StepAnswer
from fsdpcheck.workload import models
from fsdpcheck.workload.optimizer import at_step


def of_grad_norm(answer: Answer, step: int, rank: int, got: float) -> Causes | None:
    """Causes of a wrong global gradient norm that ``rank`` returned."""
    wanted, case = answer.steps[step], answer.case
    if math.isnan(got):
        return []
    norm = float(wanted.grad_norm)
    if fits(case, torch.tensor(got, dtype=torch.float64), wanted.grad_norm):
        return None  # what changes little would seem to fit
    candidates = [
        (cause, torch.tensor(norm * ratio, dtype=torch.float64))
        for cause, ratio in by_ratio(case, step, "norm ratio", "it is exactly {} times the right one")
    ]
    for owner in shards.owners(case, wanted.released):
        for shard in range(case.mesh.dp_shard if case.mesh.dp_shard > 1 else 0):
            parts = [value.double()[owner[name] == shard].square().sum() for name, value in wanted.released.items()]
            own = shard == rank % case.mesh.dp_shard
            cause = Cause("own shard" if own else f"shard {shard}", f"it is the norm of rank {shard}'s shard alone")
            candidates.append((cause, torch.stack(parts).sum().sqrt()))
    candidates += _by_parameter(case, wanted)
    return fitting(case, torch.tensor(got, dtype=torch.float64), candidates)


def _by_parameter(case: TrainingCase, wanted: StepAnswer) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, global norm) where one parameter's gradient counts on every shard, or nowhere."""
    squares = {name: value.double().square().sum() for name, value in wanted.released.items()}
    total, shards_of = torch.stack(list(squares.values())).sum(), case.mesh.dp_shard
    for name, own in squares.items():
        if shards_of > 1:
            text = f"the gradient of {name} counts {shards_of} times in it, as if every rank's whole one were a shard"
            yield Cause("a parameter on every rank", text), (total + (shards_of - 1) * own).sqrt()
        if own:  # whether a gradient of zero counts is not to be told
            left = (total - own).clamp(min=0).sqrt()
            yield Cause("a parameter left out", f"the gradient of {name} is left out of it"), left


def of_clipped_update(answer: Answer, step: int, got: Mapping[str, Tensor], norm: float, eps: float) -> Causes | None:
    """Causes of an update with a gradient clipped wrongly by its global norm, of which ``norm`` was returned."""
    case, wanted = answer.case, answer.steps[step]
    if case.step.max_grad_norm is None or (step and case.step.optimizer != at_step(case.step.optimizer, 0)):
        return None
    if step and (case.step.optimizer.kind != "sgd" or case.step.optimizer.momentum):
        return None  # the update depends on earlier steps
    found = []
    for cause, clipped in _clipped(case, wanted, norm, eps):
        if all(fits(case, clipped[name], value) for name, value in wanted.used.items() if value.numel()):
            continue  # here the mistake changes nothing
        params = oracle.update(case, wanted.before, clipped, step)
        if all(fits(case, got[name], value) for name, value in params.items() if value.numel()):
            found.append(cause)
    return found


def _clipped(case: TrainingCase, wanted: StepAnswer, norm: float, eps: float) -> Iterator[tuple[Cause, Named]]:
    """(cause, gradient given to the optimizer) when the global norm is not what clips."""
    limit, released = float(case.step.max_grad_norm or 0.0), wanted.released
    dtype = models.DTYPES[case.arithmetic.dtype]

    def factor(squared: Tensor) -> Tensor:
        return oracle.global_factor(squared.to(dtype).sqrt(), limit, eps)

    squares = {name: value.double().square().sum() for name, value in released.items()}
    by_unit = shards.units(case, list(released))
    own = {name: factor(torch.stack([squares[n] for n in names]).sum()) for names in by_unit.values() for name in names}
    text = "each unit's gradient is clipped by its own norm, not by the global one"
    yield Cause("unit by unit", text), {name: value * own[name] for name, value in released.items()}
    yield Cause("not clipped", "the gradient is not clipped at all"), released
    over = torch.clamp(torch.tensor(limit / (norm + eps), dtype=dtype), min=1.0)
    text = "clipping is turned round: what is longer than the limit stays, and what is shorter is scaled up to it"
    yield Cause("turned round", text), {name: value * over for name, value in released.items()}
    for owner in shards.owners(case, released):
        parts = [
            sum((value.double()[owner[n] == s].square().sum() for n, value in released.items()), torch.zeros(()))
            for s in range(case.mesh.dp_shard)
        ]
        each = torch.stack([factor(torch.as_tensor(part)) for part in parts])
        text = "each rank clips its shard by the norm of its own shard"
        yield Cause("own shard", text), {n: value * each[owner[n]] for n, value in released.items()}
