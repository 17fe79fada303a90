"""The low-precision tier: cases that are exact even where the model computes in bfloat16, or in TF32 on a GPU.

In mixed precision a model computes with bfloat16 copies of float32 parameters, its loss is computed in float32, and
gradients are reduced in it. Where every operand and every result fits the 8 bits of a bfloat16 and every sum
the 24 of a float32, none of these roundings happens, and the right answer is still the float64 one. With TF32, factors
of matrix products fit 11 bits, and everything else is float32.

What is proved is proved of each micro-batch of each rank: a bound of 8 bits on its gradient covers every part of it.
The sum over micro-batches and ranks has the 24 bits of a float32, as oracle/certificate.py shows, and may need more
than 8: an implementation that adds up or reduces in bfloat16 is seen. So is one that keeps norms, reduced gradients or
the parameters that it trains in 8 bits. How parameters are rounded on their way into the model is not: here none is.

A clip factor that is a power of two ("exact" clipping) takes no bits, only a finer grid where it is not every sample's.
Other factors ("probe") have more bits than a bfloat16: of such a case norms are proved, and no weighted sum.
Source: Certifier, with the significands of bfloat16 (8 bits), TF32 (11) and float32 (24), IEEE 754 round to nearest.

Legend: n samples of a micro-batch, R rows of the instrument.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.case.traits import not_in_low_precision
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.certifier import PRECISIONS, Certifier
from fsdpcheck.exact.grid import bits, grid_exponent, significand_bits
from fsdpcheck.exact.operators import Bound
from fsdpcheck.oracle import Answer, StepAnswer, batched_step
from fsdpcheck.workload import batches, models, numerics
from fsdpcheck.workload.clip_groups import INSTRUMENT


def prove(case: TrainingCase, answer: Answer, used: dict[str, int]) -> None:
    """Add to ``used`` the most bits any step takes in ``case.arithmetic.compute``, by stage; proof.prove calls it.

    Raises NotExact naming step, rank, stage, bits needed and had, also where the model has functions or kernels of
    which nothing is known in few bits. Guarantee: if it returns, forward, both backwards, and the gradient of every
    part of every rank's micro-batches are exact in every order of summation; where clip factors are no powers of two,
    without the weighted backward.
    """
    compute = case.arithmetic.compute
    if unfit := sorted(case.requires() & not_in_low_precision(case.model.own is not None)):
        raise NotExact(f"case, {compute}: {', '.join(unfit)} on no grid of few bits")
    if case.model.own is not None and case.model.own.names not in ("", "float32"):
        raise NotExact(f"case, {compute}: your model names {case.model.own.names} besides")
    _shows_something(case, answer)
    model, scalar = models.wide(case), batched_step.loss_scalar(case)
    for k, step in enumerate(answer.steps):
        batched_step.load(model, step)
        weighs = scalar if batched_step.reduces_exactly(answer, step) else None
        for rank, times in _micro_batches(case, k):
            certifier = _certifier(case, model, f"step {k}, rank {rank} in {compute}", used)
            _prove_micro_batch(case, step, model, certifier, times, weighs)


def _shows_something(case: TrainingCase, answer: Answer) -> None:
    """On whole numbers the probabilities of a loss may be those that are wanted, of every sample."""
    used = [step.used[name] for step in answer.steps if step.samples for name in step.used if name != INSTRUMENT]
    if case.model.own is not None and used and not any(map(torch.count_nonzero, used)):
        raise NotExact(f"case, {case.arithmetic.compute}: every gradient of your model is 0, which shows nothing")


def _certifier(case: TrainingCase, model: models.CaseModel, where: str, used: dict[str, int]) -> Certifier:
    """Of few bits, and on a user's model of float32 where it names that; buffers are of it in any case."""
    if case.model.own is None:
        return Certifier(PRECISIONS[case.arithmetic.compute], where, used=used)
    made = Certifier(
        PRECISIONS[case.arithmetic.compute], where, used=used, roundable=True, in_wider=PRECISIONS["float32"]
    )
    made.is_in_wider(buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex())
    return made


def _micro_batches(case: TrainingCase, k: int) -> list[tuple[int, Counter[int]]]:
    """(rank, how often each sample is in one of its micro-batches of step k); of equal ones one, and no empty one."""
    found: list[tuple[int, Counter[int]]] = []
    for rank, chunks in enumerate(batches.indices(case, k)):
        for times in map(Counter, chunks):
            if times and all(times != other for _, other in found):
                found.append((rank, times))
    return found


def _prove_micro_batch(
    case: TrainingCase,
    step: StepAnswer,
    model: models.CaseModel,
    certifier: Certifier,
    times: Counter[int],
    scalar: float | None,
) -> None:
    """``scalar``: what the losses are weighted by besides the clip factors; None where that may round."""
    rows = [row for row, index in enumerate(step.samples) if index in times]
    inputs, targets = batched_step.data(case, step, rows)
    operands = {**step.before, "inputs": inputs if inputs.is_floating_point() else torch.zeros(1)}
    for name, value in operands.items():
        _fits(certifier, name, value.abs(), grid_exponent(value))
    passes = []
    if case.step.private:
        passes.append(torch.full((len(rows),), models.loss_scale(case), dtype=torch.float64))
        own_nR = step.targets[rows].abs() * models.loss_scale(case)
        _fits(certifier, f"gradient of {INSTRUMENT} of a sample", own_nR, grid_exponent(own_nR))
        _fits_a_product(certifier, own_nR)
    if scalar is not None:
        # odd counts leave the grid of a single occurrence as it is
        times_n = torch.tensor([times[step.samples[row]] | 1 for row in rows], dtype=torch.float64)
        weights_n = step.factors[rows].double() * scalar * times_n
        passes.append(weights_n)
        _fits_a_product(certifier, (step.factors[rows].double() * scalar).unsqueeze(1) * step.targets[rows])
        sum_R = torch.tensordot(weights_n, step.targets[rows].abs(), dims=1)
        exponent = grid_exponent(weights_n) + grid_exponent(step.targets[rows])
        _fits(certifier, f"gradient of {INSTRUMENT}", sum_R, exponent)
    for name, bound in _gradients(case, model, certifier, inputs, targets, passes):
        _fits(certifier, f"gradient of {name}", bound.terms, bound.exponent)


def _gradients(
    case: TrainingCase,
    model: models.CaseModel,
    certifier: Certifier,
    inputs: Tensor,
    targets: Tensor,
    passes: list[Tensor],
) -> list[tuple[str, Bound]]:
    """Bounds on the gradients, by name, of each backward pass: losses weighted by each of ``passes`` [n]."""
    trained = batched_step.trained(model)
    found: list[tuple[str, Bound]] = []
    with numerics.of(case), certifier.casts_back(), certifier:
        outputs = model(inputs)
    losses, leaf = _losses(case, certifier, outputs, targets)
    for weights_n in passes:
        with numerics.of(case), _in_float32(certifier, "backward of the loss"):
            (cotangent,) = torch.autograd.grad(losses, leaf, weights_n, retain_graph=True)
        _fits(certifier, "gradient of the outputs", cotangent.abs(), grid_exponent(cotangent))
        certifier.stage = "backward"
        with numerics.of(case), certifier:
            gradients = batched_step.gradients(outputs, trained, cotangent, keep=True)
            found += [(name, certifier.bound(gradient)) for name, gradient in zip(trained, gradients, strict=True)]
    return found


def _losses(case: TrainingCase, certifier: Certifier, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [n] of the outputs cast to float32, and those."""
    leaf = outputs.detach().requires_grad_()
    within = _in_float32(certifier, "loss")
    with numerics.of(case), within, within.values_unused():
        return batched_step.loss(case)(leaf, targets), leaf


def _in_float32(certifier: Certifier, stage: str) -> Certifier:
    return Certifier(PRECISIONS["float32"], certifier.where, stage=stage, used=certifier.used)


def _fits(certifier: Certifier, name: str, bound: Tensor, exponent: int) -> None:
    """Raise NotExact unless every sum of terms on the grid 2**exponent, bounded by ``bound``, is one result."""
    needed, had = bits(float(bound.max()) if bound.numel() else 0.0, exponent), certifier.precision.result
    if needed > had:
        raise NotExact(f"{certifier.where}, {name}: needs {needed} bits; had {had}")
    certifier.used[name] = max(certifier.used.get(name, 0), needed)


def _fits_a_product(certifier: Certifier, value_nR: Tensor) -> None:
    """Raise NotExact unless each number that reaches the instrument is a factor that a product leaves as it is."""
    needed, had = significand_bits(value_nR), certifier.precision.operand
    if needed > had:
        raise NotExact(f"{certifier.where}, what reaches {INSTRUMENT}: needs {needed} bits as a factor; had {had}")
