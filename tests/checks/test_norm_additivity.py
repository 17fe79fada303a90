"""Squared norms over parts of the parameters: right ones add up, and each way in which wrong ones do not is told."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import get_args

import pytest
import torch

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.checks.norm_additivity import assert_additive
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.strategies import enumeration, metamorphic
from tests.common.fabricated import SMALL, execution

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)) - {"real", "per-layer-clipping"})
CASE = replace(SMALL, step=StepSpec("linear", clipping="unclipped", normaliser=8))


def runs(case: TrainingCase = CASE) -> list[Execution]:
    return [execution(oracle.answer(part)) for part in metamorphic.partly_frozen(case, EVERYTHING)]


def norms(run: Execution, rank: int = 0) -> torch.Tensor:
    found = run.ranks[rank].steps[0].norms
    assert found is not None
    return found


def test_parts_are_frozen_that_make_up_what_is_trained_and_exact_squares_add_up() -> None:
    compared, shared, by_both = 0, 0, 0
    for case in enumeration.distinct(strategies.cases_of(strategies.PRIVATE_UNCLIPPED, EVERYTHING), 24):
        one = replace(case, step=replace(case.step, steps=1, resume=False))
        try:
            parts = metamorphic.partly_frozen(one, EVERYTHING)
        except NotExact:
            continue
        answers = [oracle.answer(part) for part in parts]
        whole, first, second, *both = (set(answer.trainable) for answer in answers)
        assert whole == first | second
        assert whole > first
        assert whole > second
        assert both == [first & second] * case.model.has_front
        assert case.model.has_front or not {name for name in first & second if "instrument" not in name}
        squares = [answer.steps[0].squared_norms for answer in answers]
        rest = squares[3] if both else torch.zeros_like(squares[0])
        assert torch.equal(squares[0] + rest, squares[1] + squares[2])
        tied = case.model.tied is not None and case.model.tied[0] >= 0
        compared, shared, by_both = compared + 1, shared + tied, by_both + bool(both)
    assert compared >= 12
    assert shared >= 1
    assert by_both >= 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ModelSpec((LayerSpec(1),)), "no two parameters"),
        (ModelSpec((LayerSpec(1, frozen="weight", bias=True),)), "no two parameters"),
        (ModelSpec((LayerSpec(2), LayerSpec(2)), features=2, tied=(0, 1)), "no two parameters"),
        (ModelSpec((LayerSpec(1), LayerSpec(1))), "does not accept"),
    ],
)
def test_a_case_that_cannot_be_split_is_refused(model: ModelSpec, reason: str) -> None:
    with pytest.raises(NotExact, match=reason):
        metamorphic.partly_frozen(
            TrainingCase(model, step=StepSpec("linear", clipping="unclipped")), Features(frozenset())
        )


def test_rounded_roots_of_exact_squares_pass() -> None:
    for dtype in ("float64", "float32"):
        assert_additive(runs(replace(CASE, arithmetic=replace(CASE.arithmetic, dtype=dtype))), Fraction(0))


@pytest.mark.parametrize(("dtype", "ulp"), [("float64", 2.0**-52), ("float32", 2.0**-23)])
def test_four_ulps_are_more_than_the_roots_round(dtype: str, ulp: float) -> None:
    one = runs(replace(CASE, arithmetic=replace(CASE.arithmetic, dtype=dtype)))
    norms(one[0], rank=1)[1] *= 1 + 4 * ulp
    with pytest.raises(Violation, match="do not add up") as caught:
        assert_additive(one, Fraction(0))
    assert caught.value.where == (
        "step 0, rank 1, sample 4 (local 1); frozen units.0.linear0.weight, units.0.linear0.bias;"
        " or units.1.linear1.weight, units.1.linear1.bias"
    )
    assert not caught.value.cause
    assert_additive(one, Fraction(4, 2**23) if dtype == "float32" else Fraction(4, 2**52))


def test_there_is_one_norm_a_sample_of_the_right_dtype_and_no_negative_one() -> None:
    for wrong in (lambda own: own[:-1], lambda own: own[:0], lambda own: own[0], lambda own: own.float()):
        one = runs()
        one[1].ranks[0].steps[0].norms = wrong(norms(one[1]))
        with pytest.raises(Violation, match=r"not every sample has a norm, with .*\.weight, .* frozen"):
            assert_additive(one, Fraction(0))
    one = runs()
    norms(one[2]).neg_()
    with pytest.raises(Violation, match="do not add up"):
        assert_additive(one, Fraction(0))
    one = runs()
    norms(one[2])[0] = float("nan")
    with pytest.raises(Violation, match=r"NaN|nan"):
        assert_additive(one, Fraction(0))


def test_norms_that_add_up_themselves_and_frozen_parameters_that_count_are_named() -> None:
    case = replace(CASE, model=ModelSpec((LayerSpec(2), LayerSpec(2)), features=2), mesh=MeshSpec(1))
    case = replace(case, layout=BatchLayout(batch_size=2), step=replace(case.step, normaliser=1))
    whole, first, second = added = runs(case)
    norms(whole).copy_(norms(first) + norms(second))
    with pytest.raises(Violation) as caught:
        assert_additive(added, Fraction(0))
    assert caught.value.cause == "the norms of parameters are added, where their squares should be"
    whole, first, second = counted = runs(case)
    norms(first).copy_(norms(whole))
    with pytest.raises(Violation) as caught:
        assert_additive(counted, Fraction(0))
    assert caught.value.cause == "frozen parameters count: freezing a part of them leaves the norm as it is"
    norms(second).copy_(norms(whole))
    with pytest.raises(Violation) as caught:
        assert_additive(counted, Fraction(0))
    assert caught.value.cause == "frozen parameters count: freezing a part of them leaves the norm as it is"
