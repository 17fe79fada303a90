"""Causes in undeclared conventions: where an implementation divides by W, and what unused parameters get.

Legend: W ranks, K reductions of a step, N the normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis.cause_fit import chunks
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload import models

_DIVIDED = "every rank's gradient is divided by W before the sum"
_MULTIPLIED = "every rank's gradient is multiplied by the rounded 1/W before the sum"
_AFTER = "the sum over the ranks is multiplied by the rounded 1/W"


def undeclared(answer: Answer, step: int, got: Mapping[str, Tensor], explains: Callable[[Named], Named]) -> list[Cause]:
    """Conventions not declared that give ``got``, bit for bit. ``explains``: what ``got`` would be for a gradient."""
    found = []
    for text, gradient in _averages(answer, step):
        value = explains(gradient)
        if all(torch.equal(got[name], value[name]) for name in value):
            declared = "Features.arithmetic declares a division of the sum"
            means = "declare ArithmeticRule(averaging='before'), of functions of your own by --averaging before"
            found.append(Cause(text, f"{text}, and {declared}: if this is meant, {means}"))
    wanted = answer.steps[step]
    if len(wanted.used) < len(wanted.released) and answer.case.step.max_grad_norm is None:
        value = explains(wanted.released)
        if len(value) == len(wanted.released) and all(torch.equal(got[name], value[name]) for name in value):
            found.append(Cause("unused", _zeros([name for name in wanted.released if name not in wanted.used])))
    return found


def of_names(answer: Answer, step: int, got: Mapping[str, Tensor]) -> str:
    """Why gradients are shown of other parameters than ``Features.arithmetic.unused`` says; "" if that is not why."""
    wanted = answer.steps[step]
    extra, missing = got.keys() - wanted.used.keys(), wanted.used.keys() - got.keys()
    if extra and not missing and extra <= wanted.released.keys() and not any(bool(got[n].any()) for n in extra):
        return _zeros(sorted(extra))
    if missing and not extra and not any(bool(wanted.used[name].any()) for name in missing):
        said = f"{_few(sorted(missing))}: no gradient, and Features.arithmetic declares zeros for unused parameters"
        return f"{said}: if this is meant, declare ArithmeticRule(unused='none')"
    return ""


def _zeros(names: Sequence[str]) -> str:
    said = f"{_few(names)}: zeros for gradients, though no sample of the step depends on it; a single device has None"
    return f"{said}: if this is meant, declare ArithmeticRule(unused='zero'), or 'zero-in-used-unit'"


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _averages(answer: Answer, step: int) -> Iterator[tuple[str, Named]]:
    """(in words, released gradient) of averages that round otherwise than one division of the sum."""
    case = answer.case
    if answer.arithmetic.averaging != "after" or case.world_size & (case.world_size - 1) == 0:
        return
    if case.mesh.dp_replicate > 1 or case.step.max_grad_norm is not None:
        return
    world, local = case.world_size, _local(answer, step)
    yield _DIVIDED, _reduced(local, lambda value: value / world, lambda total: total)
    yield _MULTIPLIED, _reduced(local, lambda value: value * _inverse(value, world), lambda total: total)
    yield _AFTER, _reduced(local, lambda value: value, lambda total: total * _inverse(total, world))


def _inverse(like: Tensor, world: int) -> Tensor:
    return like.new_ones(()) / world


def _local(answer: Answer, step: int) -> list[list[Named]]:
    """By reduction and rank: the rank's own gradient, exact, in the case's dtype."""
    case, wanted = answer.case, answer.steps[step]
    scale = float(Fraction(case.shares) / Fraction(case.step.normaliser))
    dtype = models.DTYPES[case.arithmetic.dtype]
    found: list[list[Named]] = [[] for _ in range(case.step.reductions)]
    for mine in chunks(case, step, wanted):
        for number, own in enumerate(mine if case.step.reductions > 1 else [[row for part in mine for row in part]]):
            weights = torch.zeros(len(wanted.samples), dtype=torch.float64)
            for row in own:
                weights[row] += wanted.factors[row].double() * scale
            sums = {name: torch.tensordot(weights, wanted.gradients[name], dims=1).to(dtype) for name in wanted.used}
            found[number].append(sums)
    return found


def _reduced(
    local: Sequence[Sequence[Named]], before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
) -> Named:
    """Reductions one after another, in rank order, each of what the earlier ones gave and the rank's own gradient."""
    total: Named = {}
    for ranks in local:
        sums: Named = {}
        for own in ranks:
            for name, value in own.items():
                part = before(value + total[name] if total else value)
                sums[name] = sums[name] + part if name in sums else part
        total = {name: after(value) for name, value in sums.items()}
    return total


def updated(case: TrainingCase, before: Named, step: int) -> Callable[[Named], Named] | None:
    """Gradient -> trained parameters after ``step``; None where they depend on earlier gradients too."""
    optimizer = case.step.optimizer
    if step and (optimizer.kind != "sgd" or optimizer.momentum):
        return None
    return lambda gradient: {
        name: value for name, value in oracle.update(case, before, gradient, step).items() if name in gradient
    }
