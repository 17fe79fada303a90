"""Squared norms over parts of the parameters: right ones add up, and each way in which wrong ones do not is told."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import get_args

import pytest
import torch

from fsdpcheck import oracle, siblings, strategies
from fsdpcheck.adapters._base import Features, Promise
from fsdpcheck.case import BatchLayout, Case, LayerSpec, MeshSpec, ModelSpec, StepSpec, Trait
from fsdpcheck.checks.additive import assert_additive
from fsdpcheck.errors import NotExact, Violation
from fsdpcheck.execution import Execution
from fsdpcheck.strategies import drawing
from tests.fabricated import SMALL, execution

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)) - {"real", "per-layer-clipping"})
CASE = replace(SMALL, step=StepSpec("linear", clipping="unclipped", normaliser=8))


def runs(case: Case = CASE) -> list[Execution]:
    return [execution(oracle.answer(part)) for part in siblings.partly_frozen(case, EVERYTHING)]


def norms(run: Execution, rank: int = 0) -> torch.Tensor:
    found = run.ranks[rank].steps[0].norms
    assert found is not None
    return found


def test_exact_squares_add_up_over_what_siblings_freeze() -> None:
    compared, shared, by_both = 0, 0, 0
    for case in drawing.distinct(strategies.cases(EVERYTHING, clipping=("unclipped",)), 60):
        one = replace(case, step=replace(case.step, steps=1, resume=False))
        try:
            parts = siblings.partly_frozen(one, EVERYTHING)
        except NotExact:
            continue
        assert len(set(parts)) == len(parts) >= 3
        squares = [oracle.answer(part).steps[0].squared_norms for part in parts]
        both = squares[3] if len(parts) == 4 else torch.zeros_like(squares[0])
        assert torch.equal(squares[0] + both, squares[1] + squares[2])
        compared, shared, by_both = compared + 1, shared + (case.model.tied is not None), by_both + (len(parts) == 4)
    assert compared >= 30
    assert shared >= 1
    assert by_both >= 10


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
        siblings.partly_frozen(Case(model, step=StepSpec("linear", clipping="unclipped")), Features(frozenset()))


def test_one_ulp_is_within_the_rounding_of_the_roots_and_ten_are_not() -> None:
    for ulps, found in ((1, False), (10, True)):
        one = runs()
        norms(one[0], rank=1)[1] *= 1 + ulps * 2.0**-52
        if not found:
            assert_additive(one, Fraction(0))
            continue
        with pytest.raises(Violation, match="do not add up") as caught:
            assert_additive(one, Fraction(0))
        assert caught.value.where == "step 0, rank 1, sample 4 (local 1)"
        assert not caught.value.cause
        assert_additive(one, Fraction(1, 2**48))


def test_norms_of_nothing_or_of_no_number_are_no_norms() -> None:
    one = runs()
    for run in one:
        run.ranks[0].steps[0].norms = torch.zeros(0, dtype=torch.float64)
    with pytest.raises(Violation, match="not every sample has a norm"):
        assert_additive(one, Fraction(0))
    one = runs()
    one[1].ranks[0].steps[0].norms = norms(one[1])[:-1]
    with pytest.raises(Violation, match="has other norms"):
        assert_additive(one, Fraction(0))
    for wrong in (float("inf"), -1.0):
        one = runs()
        norms(one[2])[0] = wrong
        with pytest.raises(Violation):
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
