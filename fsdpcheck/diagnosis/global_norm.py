"""Causes of a wrong global gradient norm, and of a wrong update that it clips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

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

OWN_SHARD: Final = Cause("own shard", "each rank's norm is that of its own shard alone: not summed over the ranks")
"""Said of the norm and of what is clipped by it, in the same words: it is one mistake."""


def of_grad_norm(answer: Answer, step: int, rank: int, got: float, returned: Sequence[float] = ()) -> Causes | None:
    """Causes of a wrong global gradient norm that ``rank`` returned; ``returned``: what every rank did."""
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
            other = Cause(f"shard {shard}", f"it is the norm of rank {shard}'s shard alone")
            candidates.append((OWN_SHARD if own else other, torch.stack(parts).sum().sqrt()))
    candidates += _by_parameter(case, wanted)
    found = fitting(case, torch.tensor(got, dtype=torch.float64), candidates)
    known = any(cause.key == OWN_SHARD.key for cause in found)
    if not known and len({*returned}) > 1 and case.mesh.dp_replicate == 1 and _of_parts(case, wanted, returned):
        found.append(OWN_SHARD)
    return found


def are_of_own_shards(answer: Answer, step: int, returned: Sequence[float]) -> bool:
    """Whether the global gradient norms that ranks returned are each that of the rank's own shard."""
    causes = [of_grad_norm(answer, step, rank, norm, returned) for rank, norm in enumerate(returned)]
    return any(causes) and all(OWN_SHARD in found for found in causes if found is not None)


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


def of_clipped_update(
    answer: Answer, step: int, got: Mapping[str, Tensor], norm: float, eps: float, others: Sequence[float] = ()
) -> Causes | None:
    """Causes of an update with a gradient clipped wrongly by its global norm, of which ``norm`` was returned.

    ``others``: what the other ranks returned.
    """
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
    if not any(cause.key == "own shard" for cause in found) and _part_by_part(answer, step, got, [norm, *others], eps):
        text = "each rank clips its shard by the norm that it returned, and these are not one norm"
        whole = _of_parts(case, wanted, [norm, *others])
        found.append(OWN_SHARD if whole else Cause("own shard", text))
    return found


def _of_parts(case: TrainingCase, wanted: StepAnswer, norms: Sequence[float]) -> bool:
    """Whether norms of ranks are those of parts of the whole gradient."""
    return fits(case, torch.tensor(math.hypot(*norms), dtype=torch.float64), wanted.grad_norm)


def _part_by_part(answer: Answer, step: int, got: Mapping[str, Tensor], norms: Sequence[float], eps: float) -> bool:
    """Whether each element is updated by a gradient that was clipped by the norm of some rank, and no norm fits all."""
    case, wanted = answer.case, answer.steps[step]
    limit, dtype = float(case.step.max_grad_norm or 0.0), models.DTYPES[case.arithmetic.dtype]
    factors = {float(oracle.global_factor(torch.tensor(norm, dtype=dtype), limit, eps)) for norm in norms}
    if len(factors) < 2:
        return False
    updates = [
        oracle.update(case, wanted.before, {name: v * factor for name, v in wanted.released.items()}, step)
        for factor in factors
    ]
    like = [{name: got[name] == value for name, value in update.items()} for update in updates]
    return all(bool(torch.stack([own[name] for own in like]).any(0).all()) for name in updates[0]) and not any(
        all(bool(same.all()) for same in own.values()) for own in like
    )


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
        right = fits(case, torch.tensor(norm, dtype=torch.float64), wanted.grad_norm)
        clips = Cause("own shard", "each rank clips its shard by the norm of its own shard")
        yield clips if right else OWN_SHARD, {n: value * each[owner[n]] for n, value in released.items()}
