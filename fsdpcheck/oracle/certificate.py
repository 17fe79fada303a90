"""The bit budget: a proof, before any rank runs, that every sum of a case is exact in every order.

Theorem. If every term of a sum is a multiple of 2**e and the terms' absolute values add up to at most 2**(p+e), then
every partial sum, in every order and blocking, with or without fused multiply-add, is representable in p bits (p = 53
in float64, 24 in float32). So all correct implementations give the same bits.

``prove`` takes the single device's parameters at each step and runs all samples of the step under the certifier
(exact/certifier.py), which checks the theorem's premise at each operator of forward and backward, and then the sums
over samples, micro-batches and ranks, the squared norms in both algebraic forms, and averaging. Because the batch is
run at once, a bound on its sum is one on every share of it. Bounds are computed in float64: a sum of absolute values is
exact below 2**53 grid steps, and rounding is monotone, so a bound that exceeds the budget never looks smaller than it.

Not part of the budget: elementwise stages (norm, factor, optimizer), for which equal bits in give equal bits out; the
values of losses, which no law compares; the global gradient norm, whose law carries its own bound.

Legend: n samples of a step, F flattened body output, R rows of the instrument, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.contract import ArithmeticRule
from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import NotExact, NotOnRanks
from fsdpcheck.exact.certifier import PRECISIONS, Certifier, Precision
from fsdpcheck.exact.grid import EMPTY, bits, grid_exponent, premultiplies_exactly
from fsdpcheck.exact.operators import Bound
from fsdpcheck.exact.surrogates import spelled_out
from fsdpcheck.oracle import Answer, Named, StepAnswer, batched_step, low_precision
from fsdpcheck.workload import batches, clip_groups, models, newton_schulz, numerics, row_scaling
from fsdpcheck.workload.user_model import single_device

_UNBOUNDED = Precision(EMPTY, EMPTY, EMPTY)
_OPTIMIZERS: Final = {"newton_schulz": newton_schulz.require_exact, "row_scaled": row_scaling.require_exact}
"""Kinds of optimizer that add up elements of a gradient -> what says that such sums are exact."""
_SHORT: Final = 8
"""Bits of a number that products with it may take beside those of drawn values."""
_NAMED: Final = 4
"""Most buffers that are named."""


@dataclass
class Budget:
    """Bits used so far, by stage, of an arithmetic."""

    precision: Precision
    where: str = "case"
    used: dict[str, int] = field(default_factory=dict)

    @property
    def had(self) -> int:
        """p, the bits of the significand of sums."""
        return self.precision.accumulator

    def spend(self, stage: str, bound: Tensor, exponent: int) -> None:
        """A sum of multiples of 2**exponent whose absolute terms add up to ``bound`` (its largest entry) at most.

        Raises NotExact naming the stage, bits needed and had.
        """
        needed = bits(float(bound.max()) if bound.numel() else 0.0, exponent)
        if needed > self.had:
            raise NotExact(f"{self.where}, {stage}: needs {needed} bits; had {self.had}")
        self.used[stage] = max(self.used.get(stage, 0), needed)


def prove(case: TrainingCase, answer: Answer) -> dict[str, int]:
    """The most bits any step uses, by stage. Raises NotExact naming step, stage, bits needed and had.

    Guarantee: if it returns, every sum named in the module's text is exact in every order, in both algebraic forms of
    the norm (direct and Gram). Where clip factors are not dyadic by design ("probe"), and for nested factor rules, it
    covers per-sample gradients and norms but not the weighted sums. A case that computes in low precision is proved in
    float32 and then there (oracle/low_precision.py).
    """
    budget = Budget(_precision(case))
    _averages(case, answer.arithmetic, budget)
    model = models.wide(case)
    scalar = batched_step.loss_scalar(case)
    budget.spend("loss scale", torch.tensor(scalar), grid_exponent(torch.tensor(scalar)))
    with numerics.of(case):
        for k, step in enumerate(answer.steps):
            if step.samples:
                budget.where = f"step {k}"
                _prove_step(case, step, model, budget, _weights(answer, step, scalar))
                if (require := _OPTIMIZERS.get(case.step.optimizer.kind)) is not None:
                    for gradient in step.used.values():
                        require(gradient, budget.had, budget.where)
    if case.arithmetic.compute != "dtype":
        low_precision.prove(case, answer, budget.used)
    return budget.used


def _precision(case: TrainingCase) -> Precision:
    """That of the narrowest dtype in which a case computes: its own, or one that a user's model names in float32.

    In float64 such a model is widened on ranks as here (workload/user_model/dtype_widening.py).
    """
    named = case.model.own.names if case.model.own is not None and case.arithmetic.dtype == "float32" else ""
    name = named or case.arithmetic.dtype
    if name not in PRECISIONS:
        raise NotExact(f"case: your model computes in {name}, of which nothing is proved")
    return PRECISIONS[name]


def _prove_step(
    case: TrainingCase, step: StepAnswer, model: models.CaseModel, budget: Budget, weights: Tensor | None
) -> None:
    batched_step.load(model, step)
    bounds = _certified(case, step, model, budget, range(len(step.samples)), weights)
    if case.step.private:
        _require_nothing_spelled_out(case, budget)
        try:
            _norms(case, step, bounds, budget)
        except NotExact:  # bounded by the whole batch; each sample alone takes fewer bits
            for row in range(len(step.samples)):
                _norms(case, step, _certified(case, step, model, budget, [row], None), budget)
    if weights is not None:
        parts = torch.split(step.targets, models.instrument_rows(case), 1)
        for group, (name, own_nR) in enumerate(zip(clip_groups.instruments(case), parts, strict=True)):
            weights_n = clip_groups.column(weights, group)
            exponent = grid_exponent(own_nR) + grid_exponent(weights_n)
            budget.spend(f"weighted sum of {name}", torch.tensordot(weights_n, own_nR.abs(), dims=1), exponent)


def _require_nothing_spelled_out(case: TrainingCase, budget: Budget) -> None:
    """A private step may know a formula of a layer, which has no surrogates in it: the case must say what it needs."""
    names = [name for name in (*sorted(spelled_out.OPERATORS), "sort") if f"forward {name}" in budget.used]
    if names and "spelled-out-private" not in case.requires():
        said = f"per-sample gradients of layers that spell out {', '.join(names)} are not judged on integers"
        raise NotExact(f"{budget.where}: {said}; next: the tier of real numbers")


def _weights(answer: Answer, step: StepAnswer, scalar: float) -> Tensor | None:
    """What each sample's loss is multiplied by in the backward pass that is reduced, [n]; None if that may round.

    With per-layer clipping [n, G]: its gradient with respect to the parameters of each clipping group.

    Clip factor, loss scale and W/N, times how often the sample occurs on all ranks together, rounded up to an odd
    number, which leaves the grid of a single occurrence as it is: so the sum over the batch covers the sums over
    micro-batches and ranks. Averaging divides by W what the loss scale made a multiple of W, or else (a case without
    that factor) rounds the exact sum once, as the division by N does.
    """
    if not batched_step.reduces_exactly(answer, step):
        return None
    times_n = torch.tensor([answer.case.copies * count | 1 for count in step.multiplicity], dtype=torch.float64)
    return step.factors.double() * scalar * (times_n if step.factors.dim() == 1 else times_n[:, None])


def _averages(case: TrainingCase, rule: ArithmeticRule, budget: Budget) -> None:
    """Gradients are multiples of every axis's size; premultiplied by fl(1/size) they must still be exact.

    Where each rank divides before the sum, and gradients are reduced after every micro-batch, the last of K reductions
    divides what the first divided already: so losses must be multiples of W**K.
    """
    if rule.averaging == "none":
        _adds_up(case, budget)
        return
    mesh, before = case.mesh, rule.averaging == "before"
    factors, wanted = case.arithmetic.world_factors, case.step.reductions
    if before and mesh.data_ranks > 1 and factors < wanted:
        said = f"losses carry the factor W {factors} times; wanted {wanted}, once a reduction"
        raise NotExact(f"{budget.where}, averaging before the sum: {said}")
    if before or case.arithmetic.averaging == "premultiply":
        for size in (mesh.dp_shard, mesh.dp_replicate, mesh.data_ranks):
            if not premultiplies_exactly(size, budget.had):
                said = f"{budget.where}, averaging: multiples of {size} times the rounded 1/{size} round again"
                raise (NotOnRanks if before else NotExact)(said)  # an implementation that averages before has no choice


def _adds_up(case: TrainingCase, budget: Budget) -> None:
    """1/N is rounded where W divides N; times the losses' own scale, a multiple of W, it must be exact all the same."""
    dtype, scale = models.DTYPES[case.arithmetic.dtype], models.loss_scale(case)
    given = torch.tensor(batches.share(case, averages=False), dtype=dtype) * scale
    wanted = Fraction(scale) * Fraction(case.shares) / Fraction(case.step.normaliser) / case.mesh.data_ranks
    if Fraction(float(given)) != wanted:
        raise NotOnRanks(f"{budget.where}, sums that are not averaged: {scale} times the rounded 1/N is not exact")


def _certified(
    case: TrainingCase,
    step: StepAnswer,
    model: models.CaseModel,
    budget: Budget,
    rows: Sequence[int],
    weights: Tensor | None,
) -> dict[str, Bound]:
    """Certify forward and backward of some samples at once; bounds on the terms of the body's gradients, loss scale 1.

    With ``weights`` the weighted backward pass too. What is said of a user's own model names its wide buffers.
    """
    inputs, targets = batched_step.data(case, step, rows)
    loss, trained = batched_step.loss(case), batched_step.trained(model)
    certifier = Certifier(budget.precision, budget.where, used=budget.used, roundable=case.model.own is not None)
    with _naming_wide_buffers(model), certifier:
        outputs = _outputs(case, model, inputs)
        certifier.on_grid(outputs)
        with certifier.values_unused():
            losses = loss(outputs, targets)
        certifier.stage = "backward"
        ones = torch.ones(len(rows), dtype=torch.float64)
        gradients = batched_step.gradients(losses, trained, ones, keep=weights is not None)
        bounds = {name: certifier.bound(gradient) for name, gradient in zip(trained, gradients, strict=True)}
        if weights is not None:
            certifier.stage = "weighted backward"
            for group in range(len(clip_groups.names(case))):
                own = clip_groups.members(case, trained, group)
                batched_step.gradients(losses, own, clip_groups.column(weights, group), keep=True)
    return bounds


def _outputs(case: TrainingCase, model: models.CaseModel, inputs: Tensor) -> Tensor:
    """A forward under the certifier; what it says of a user's own model names the module and the line."""
    if case.model.own is None:
        result: Tensor = model(inputs)
        return result
    with single_device.followed(model.get_submodule("model")) as at:
        try:
            result = model(inputs)
        except NotExact as error:
            line = single_device.line_of(error)
            where = [f"in module {at[-1]}"] * bool(at) + [f"at {line}"] * bool(line)
            raise NotExact("; ".join([str(error), ", ".join(where)])) from None
    return result


@contextmanager
def _naming_wide_buffers(model: models.CaseModel) -> Iterator[None]:
    """What is said inside of a user's own model names its wide buffers."""
    try:
        yield
    except NotExact as error:
        if not isinstance(model, models.UserCaseModel):
            raise
        raise type(error)("; ".join([str(error), *_wide_buffers(model)])) from None


def _wide_buffers(model: models.CaseModel) -> list[str]:
    """What is said of a user's buffers whose products take more bits than there are: tables, say."""
    wide = [
        name.removeprefix("model.")
        for name, value in model.named_buffers()
        if value.is_floating_point() and bool(value.isfinite().all()) and _bits(value) > _SHORT
    ]
    if not wide:
        return []
    named = ", ".join(wide[:_NAMED]) + f" and {len(wide) - _NAMED} more" * (len(wide) > _NAMED)
    return [f"buffers keep their values, and those of {named} are no short numbers; computed in forward, a cosine is"]


def _bits(value: Tensor) -> int:
    return bits(float(value.abs().max()), grid_exponent(value)) if value.numel() else 0


def traced_gradients(
    losses: Tensor, trained: Mapping[str, nn.Parameter], weights: Tensor, keep: bool
) -> tuple[Named, Named]:
    """Gradients of sum_i weights_i L_i, and the same with every path's absolute value added up; ``losses`` [b] float64.

    Only the backward pass is traced. ``keep``: the graph is needed again. Raises NotExact for an operator that has no
    rule.
    """
    with Certifier(_UNBOUNDED, "bounds", stage="backward", paths=True) as certifier:
        gradients = batched_step.gradients(losses, dict(trained), weights, keep)
    found = dict(zip(trained, gradients, strict=True))
    return found, {name: certifier.bound(value).terms.reshape(value.shape) for name, value in found.items()}


def _norms(case: TrainingCase, step: StepAnswer, bounds: dict[str, Bound], budget: Budget) -> None:
    """Squared norms, scaled, over all parameters.

    With H the bound of a weight's gradient, |H|_F^2 bounds the direct sum of squares and also every sum of the Gram
    form <A A^T, G G^T>: its terms' absolute values add up to ||G|^T |A||_F^2, and an entry of A A^T or G G^T that is
    not multiplied by zero is at most that over the other factor's grid step. The cross terms of a weight used twice are
    covered too: H adds both uses up before squaring.
    """
    scale = models.loss_scale(case)
    largest = step.targets.square().sum(1).max() if len(step.targets) else torch.zeros(())
    total = torch.stack([largest, *(bound.terms.square().sum() for bound in bounds.values())]).sum()
    exponent = min([2 * grid_exponent(step.targets), *(2 * bound.exponent for bound in bounds.values())])
    budget.spend("squared norms", total * scale**2, exponent + 2 * grid_exponent(torch.tensor(scale)))


def absolute_gradients(case: TrainingCase, step: StepAnswer) -> dict[str, Tensor]:
    """Per-sample gradients [n, *shape] with every path's absolute value added up, loss scale 1, trainable only.

    The backward pass of absolute values: what rounding errors committed anywhere in a weighted backward pass are
    relative to. Frozen parameters are passed through but not listed.
    """
    model = models.wide(case)
    batched_step.load(model, step)
    loss, trained = batched_step.loss(case), batched_step.trained(model)
    found: dict[str, list[Tensor]] = {name: [] for name in trained}
    with numerics.of(case):
        for row in range(len(step.samples)):
            inputs, targets = batched_step.data(case, step, [row])
            losses = loss(model(inputs), targets)
            _, paths = traced_gradients(losses, trained, torch.ones(1, dtype=torch.float64), keep=False)
            for name in trained:
                found[name].append(paths[name])
    stacked = {name: torch.stack(rows) for name, rows in found.items()}
    parts = torch.split(step.targets.abs().unsqueeze(-1), models.instrument_rows(case), 1)
    return {**stacked, **dict(zip(clip_groups.instruments(case), parts, strict=True))}
