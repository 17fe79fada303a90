"""The low-precision tier: cases that are exact even where operands and results are bfloat16 and sums are float32.

In mixed precision a model computes with bfloat16 copies of float32 parameters, its loss takes outputs cast to float32,
and gradients are reduced in float32. Where every operand and every result fits the 8 bits of a bfloat16 and every sum
the 24 of a float32, none of these roundings happens, and the right answer is still the float64 one. A gradient that is
bounded by 8 bits over the whole batch fits them on every share of it, so micro-batches may add up in bfloat16 too.

Only plain training and clipping with C above every norm: a clip factor below one has more bits than a bfloat16.
Source: Certifier, with the significands of bfloat16 (8 bits) and float32 (24), IEEE 754 round to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdpcheck import models, proof
from fsdpcheck.case import Case
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.certifier import BFLOAT16, Certifier, Precision
from fsdpcheck.exact.grid import bits, grid_exponent
from fsdpcheck.exact.operators import Bound
from fsdpcheck.oracle import Answer, StepAnswer


def prove(case: Case, answer: Answer, precision: Precision = BFLOAT16) -> dict[str, int]:
    """The most bits any step uses, by stage, for an implementation that computes in ``precision``.

    Raises NotExact naming step, stage, bits needed and had, also where functions need surrogates or samples are
    clipped. Guarantee: if it returns, forward, both backwards, and the gradient of every share of the batch are exact
    in every order of summation.
    """
    used = proof.prove(case, answer)
    if "surrogates" in case.requires() or case.step.clipping not in ("none", "unclipped"):
        raise NotExact("case, low precision: functions with surrogates and clipped samples are on no grid of 8 bits")
    model = models.build(case).double()
    for k, step in enumerate(answer.steps):
        if step.samples:
            proof._load(model, step)
            _prove_step(case, answer, step, model, Certifier(precision, f"step {k}, low precision", used=used))
    return used


def _prove_step(case: Case, answer: Answer, step: StepAnswer, model: models.CaseModel, certifier: Certifier) -> None:
    inputs, targets = proof._data(case, step, range(len(step.samples)))
    operands = {**step.before, "inputs": inputs if inputs.is_floating_point() else torch.zeros(1)}
    for name, value in operands.items():
        _fits(certifier, name, value.abs(), grid_exponent(value))
    loss, trained = proof._loss(case), proof._trained(model)
    scales = torch.full((len(step.samples),), models.loss_scale(case), dtype=torch.float64)
    weights = proof._weights(answer, step, proof._loss_scalar(case, proof.Budget(certifier.precision)))
    assert weights is not None, "only factors that round have none"
    found: list[tuple[str, Bound]] = []
    with certifier:
        outputs = model(inputs)
        with certifier.values_unused():
            losses = loss(outputs, targets)
        certifier.stage = "backward"
        for own in (scales, weights) if case.step.private else (weights,):
            gradients = proof._gradients(losses, trained, own, keep=True)
            found += [(name, certifier.bound(gradient)) for name, gradient in zip(trained, gradients, strict=True)]
    for name, bound in found:
        _fits(certifier, f"gradient of {name}", bound.terms, bound.exponent)


def _fits(certifier: Certifier, name: str, bound: Tensor, exponent: int) -> None:
    """Raise NotExact unless every sum of terms on the grid 2**exponent, bounded by ``bound``, is one result."""
    needed, had = bits(float(bound.max()) if bound.numel() else 0.0, exponent), certifier.precision.result
    if needed > had:
        raise NotExact(f"{certifier.where}, {name}: needs {needed} bits; had {had}")
    certifier.used[name] = max(certifier.used.get(name, 0), needed)
