"""Checks of norms, factors, probes and clipped sums: the smallest wrong one is seen, every right one passes."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule, GlobalNormRule
from fsdpcheck.checks.clipping import (
    assert_clipped_gradient_within_bound,
    assert_clipped_update,
    assert_factors,
    assert_global_norm,
    assert_norms_exact,
    assert_probe_coefficients,
)
from fsdpcheck.errors import UsageError
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import INSTRUMENT, Answer, bounds
from fsdpcheck.workload import batches, models
from tests.common.fabricated import (
    CLIPPED,
    EXACT,
    NESTED,
    PLAIN,
    PROBE,
    PROBE_NESTED,
    SMALL,
    clipped,
    execution,
    right_weights,
    weighted,
    with_gradient,
)


@pytest.mark.parametrize("field", ["norms", "factors"])
@pytest.mark.parametrize("answer", [EXACT, PROBE_NESTED], ids=["exact", "nested"])
def test_wrong_norms_and_factors_name_the_sample(field: str, answer: Answer) -> None:
    check = assert_norms_exact if field == "norms" else assert_factors
    made = execution(answer)
    values: Tensor = getattr(made.ranks[1].steps[0], field)
    values[1] *= 1 + 1e-12
    with pytest.raises(Violation, match=r"step 0, rank 1, sample 4 \(local 1\); 1 of 2 samples differ"):
        check(made, answer)
    values[1] = math.nan
    with pytest.raises(Violation, match="got     nan"):
        check(made, answer)
    setattr(made.ranks[1].steps[0], field, values[:1])
    with pytest.raises(Violation, match=r"got     float64\[1\]"):
        check(made, answer)


def test_a_nested_norm_may_round_and_an_exact_one_may_not() -> None:
    for answer, passes in ((PROBE_NESTED, True), (PROBE, False)):
        made = execution(answer)
        for result in made.ranks:
            step = result.steps[0]
            assert step.norms is not None
            step.norms = torch.nextafter(step.norms, torch.full_like(step.norms, math.inf))
        if passes:
            assert_norms_exact(made, answer)
        else:
            with pytest.raises(Violation):
                assert_norms_exact(made, answer)


@pytest.mark.parametrize("answer", [PROBE, PROBE_NESTED], ids=["exact", "nested"])
@pytest.mark.parametrize("black_box", [False, True])
def test_the_probe_sees_eps_left_out_or_misplaced_and_bias_left_out_of_the_norm(
    answer: Answer, black_box: bool
) -> None:
    step = answer.steps[0]
    bias = sum(g.flatten(1).square().sum(1) for name, g in step.gradients.items() if name.endswith("bias"))
    no_bias = (step.squared_norms - bias).sqrt()
    without, inside = step.norms, (step.squared_norms + 1e-6).sqrt()
    for norms in (without, inside, no_bias + 1e-6):
        factors = (answer.clip_norm / norms).clamp(max=1.0)
        made = with_gradient(answer, weighted(answer, factors / answer.case.step.normaliser))
        if black_box:
            for result in made.ranks:
                result.steps[0].grads = None
        with pytest.raises(Violation, match=rf"step 0, rank 0, {INSTRUMENT}\[\d, 0\]"):
            assert_probe_coefficients(made, answer)


@pytest.mark.parametrize("answer", [PROBE, PROBE_NESTED], ids=["exact", "nested"])
@pytest.mark.parametrize("relative", [1e-14, -1e-14])
@pytest.mark.parametrize("black_box", [False, True])
def test_the_probe_sees_one_coefficient_off_by_a_hundred_roundings(
    answer: Answer, relative: float, black_box: bool
) -> None:
    gradient = {name: value.clone() for name, value in answer.steps[0].used.items()}
    row = int(gradient[INSTRUMENT].argmax())
    gradient[INSTRUMENT][row] *= 1 + relative
    made = with_gradient(answer, gradient)
    if black_box:
        for result in made.ranks:
            result.steps[0].grads = None
    with pytest.raises(Violation, match=rf"{INSTRUMENT}\[{row}, 0\]; 1 of 9"):
        assert_probe_coefficients(made, answer)


def test_the_probe_is_read_bit_for_bit_where_averaging_is_exact() -> None:
    case = replace(clipped("probe"), mesh=replace(SMALL.mesh, dp_shard=4))
    answer = oracle.answer(case, FactorRule(eps=1e-6))
    assert_probe_coefficients(execution(answer), answer)
    made = execution(answer)
    for result in made.ranks:
        assert result.steps[0].grads is not None
        value = result.steps[0].grads[INSTRUMENT]
        result.steps[0].grads[INSTRUMENT] = torch.nextafter(value, torch.full_like(value, math.inf))
    with pytest.raises(Violation):
        assert_probe_coefficients(made, answer)


def test_a_probe_needs_a_probe_case_and_a_readable_update() -> None:
    with pytest.raises(UsageError, match='wanted "probe"'):
        assert_probe_coefficients(execution(EXACT), EXACT)
    step = replace(clipped("probe").step, optimizer=replace(SMALL.step.optimizer, kind="adamw"))
    answer = oracle.answer(replace(SMALL, step=step))
    made = execution(answer)
    for result in made.ranks:
        result.steps[0].grads = None
    with pytest.raises(UsageError, match="observe 'grads'"):
        assert_probe_coefficients(made, answer)


@pytest.mark.parametrize("source", ["factors", "probe", "answer"])
@pytest.mark.parametrize("black_box", [False, True])
def test_a_clipped_gradient_outside_the_bound_is_seen(source: str, black_box: bool) -> None:
    answer = oracle.answer(clipped("exact"), NESTED) if source == "answer" else PROBE_NESTED
    weights = right_weights(answer)
    dropped = weights.clone()
    dropped[3] = 0
    for gradient in (weighted(answer, dropped), weighted(answer, weights * (1 + 1e-12))):
        gradient[INSTRUMENT] = answer.steps[0].used[INSTRUMENT]
        made = with_gradient(answer, gradient)
        for result in made.ranks:
            result.steps[0].factors = result.steps[0].factors if source == "factors" else None
            result.steps[0].grads = None if black_box else result.steps[0].grads
        with pytest.raises(Violation, match="sum of clipped per-sample gradients"):
            assert_clipped_gradient_within_bound(made, answer)


def _inputs(answer: Answer) -> Tensor:
    return batches.inputs(answer.case)[list(answer.steps[0].samples)]


def _targets(answer: Answer) -> Tensor:
    return batches.targets(answer.case)[list(answer.steps[0].samples)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_honest_clipped_gradient_in_another_order_stays_within_the_bound(dtype: str) -> None:
    for seed in range(20):
        arithmetic = replace(SMALL.arithmetic, dtype=dtype)
        answer = oracle.answer(replace(clipped("probe"), seed=seed, arithmetic=arithmetic), NESTED)
        case, step = answer.case, answer.steps[0]
        model = models.build(case)
        packed = torch.cat([_targets(answer), step.targets.to(step.norms.dtype)], 1)
        losses = models.loss_for(case)(model(_inputs(answer)), packed)
        (losses * step.factors * (3 / 8)).sum().backward()
        gradient = {name: p.grad / 3 for name, p in model.named_parameters() if p.grad is not None}
        made = with_gradient(answer, gradient)
        assert_clipped_gradient_within_bound(made, answer)
        assert_probe_coefficients(made, answer)


def test_a_global_norm_outside_its_bound_is_seen_and_one_within_it_is_not() -> None:
    answer = CLIPPED
    bound = float(bounds.global_norm_bound(answer, answer.steps[0], GlobalNormRule()))
    for relative, passes in ((bound / 2, True), (-bound / 2, True), (bound * 2, False), (-1e-12, False), (-1, False)):
        made = execution(answer)
        for result in made.ranks:
            result.steps[0].grad_norm = answer.steps[0].grad_norm * (1 + relative)
        if passes:
            assert_global_norm(made, answer)
        else:
            with pytest.raises(Violation, match="global gradient norm is wrong"):
                assert_global_norm(made, answer)


def test_a_global_norm_in_float32_has_a_wider_bound_only_when_declared() -> None:
    made = execution(CLIPPED)
    for result in made.ranks:
        for step in result.steps:
            assert step.grad_norm is not None
            step.grad_norm = step.grad_norm.float()
    assert_global_norm(made, CLIPPED, GlobalNormRule(dtype="float32"))
    with pytest.raises(Violation):
        assert_global_norm(made, CLIPPED, GlobalNormRule(dtype="case"))


def test_the_clipped_update_follows_the_returned_norm_not_the_right_one() -> None:
    answer, step = CLIPPED, CLIPPED.steps[0]
    norm = torch.nextafter(step.grad_norm, torch.tensor(math.inf, dtype=torch.float64)) * 1.5
    gradient = {name: value * (0.5 / (norm + 1e-6)).clamp(max=1.0) for name, value in step.released.items()}
    made = with_gradient(answer, gradient)
    with pytest.raises(Violation, match="clipped by the returned norm"):
        assert_clipped_update(made, answer)
    for result in made.ranks:
        result.steps[0].grad_norm = norm
    made.ranks[0].steps[1].params = answer.steps[1].after
    assert_clipped_update(made, answer)
    with pytest.raises(UsageError, match="max_grad_norm"):
        assert_clipped_update(execution(PLAIN), PLAIN)


def test_clipping_that_is_turned_round_is_named_where_the_norm_is_below_the_limit() -> None:
    """Above it nothing is clipped, which is another mistake's doing as well."""
    case = replace(CLIPPED.case, step=replace(CLIPPED.case.step, max_grad_norm=float(2**20)))
    answer = oracle.answer(case)
    step = answer.steps[0]
    over = float(2**20) / (step.grad_norm + 1e-6)
    assert over > 1
    made = with_gradient(answer, {name: value * over for name, value in step.released.items()})
    with pytest.raises(Violation) as found:
        assert_clipped_update(made, answer)
    assert found.value.cause.startswith("clipping is turned round")


def test_a_factor_formed_in_float64_holds_only_when_declared() -> None:
    """Of parameters in float32: with a norm just above the largest power of two that fits, the two factors differ."""
    case = CLIPPED.case
    single = replace(
        case, step=replace(case.step, steps=1), arithmetic=replace(case.arithmetic, dtype="float32", project=False)
    )
    answer = oracle.answer(single)
    step, norm = answer.steps[0], torch.tensor(1.0 + 2**-25, dtype=torch.float64)
    gradient = {name: value * (0.5 / (norm + 1e-6)).float() for name, value in step.released.items()}
    made = with_gradient(answer, gradient)
    for result in made.ranks:
        result.steps[0].grad_norm = norm
    assert_clipped_update(made, answer, GlobalNormRule(dtype="float64"))
    with pytest.raises(Violation, match="clipped by the returned norm"):
        assert_clipped_update(made, answer, GlobalNormRule(dtype="case"))


def test_nested_norms_really_stay_within_their_bound_and_come_near_it() -> None:
    generator = torch.Generator().manual_seed(0)
    unit = bounds.UNIT_ROUNDOFF["float32"]
    worst = 0.0
    for _ in range(300):
        values = torch.randint(-9, 10, (6, 40), generator=generator).float()
        nested = torch.stack([row.norm() for row in values]).norm()
        exact = bounds.square_root(Fraction(int(values.double().square().sum())))
        bound = bounds.nested_norm_bound((40, 6), unit)
        error = abs(Fraction(float(nested)) / exact - 1)
        assert error <= bound
        worst = max(worst, float(error / bound))
    assert worst > 0


def test_bounds_are_no_wider_than_their_derivation() -> None:
    unit = bounds.UNIT_ROUNDOFF["float64"]
    assert bounds.nested_norm_bound((40, 6), unit) <= Fraction(28 * unit)
    parameters = len(PROBE_NESTED.trainable)
    assert bounds.sample_norm_bound(PROBE_NESTED) <= (Fraction(parameters, 2) + 6) * unit
    assert bounds.factor_bound(PROBE_NESTED) <= (Fraction(parameters, 2) + 9) * unit
    assert bounds.sample_norm_bound(PROBE) == bounds.factor_bound(PROBE) == 0


def test_the_exact_root_is_exact() -> None:
    assert bounds.square_root(Fraction(49, 4)) == Fraction(7, 2)
    assert bounds.square_root(Fraction(0)) == 0
    error = bounds.square_root(Fraction(2)) ** 2 / 2 - 1
    assert -(Fraction(1, 2**180)) < error <= 0
