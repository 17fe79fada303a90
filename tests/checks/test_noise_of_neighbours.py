"""Noise of neighbouring batches: one draw under all sums is alike; any other is reported with what it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.checks.noise import noisy, standing
from fsdpcheck.checks.privacy import Noisy, assert_same_noise
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.strategies import neighbours
from tests.common.fabricated import execution

CASE = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True),), features=2),
    MeshSpec(2),
    BatchLayout("contiguous", 5),
    StepSpec("linear", clipping="probe", clip_norm=4, normaliser=8),
    seed=4,
)
PAIR = neighbours.of(standing(noisy(CASE), 2), Features(frozenset({"private"}), frozenset(get_args(Trait))))


def side(case: TrainingCase, draws: int = 0, scale: float = 1.0, at: int = 0) -> Noisy:
    """Draws 0 at every step; from step ``at`` on others, or ``scale`` times as large."""
    answer = oracle.answer(case)
    clean, loud = execution(answer), execution(answer)
    for result in loud.ranks:
        for k, step in enumerate(result.steps):
            generator = torch.Generator().manual_seed(100 * k + draws * (k >= at))
            assert step.grads is not None
            for value in step.grads.values():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                value += noise * (scale if k >= at else 1.0)
    return loud, clean, answer


def test_one_draw_under_different_sums_is_alike() -> None:
    one, two = side(PAIR.first), side(PAIR.second)
    sums = [next(iter(own[1].ranks[0].steps[0].grads.values())) for own in (one, two)]  # type: ignore[union-attr]
    assert not torch.equal(*sums)
    assert_same_noise(PAIR, one, two)


@pytest.mark.parametrize("at", [0, 1])
def test_other_draws_are_found_at_every_step(at: int) -> None:
    with pytest.raises(Violation, match="noise depends on one record") as caught:
        assert_same_noise(PAIR, side(PAIR.first), side(PAIR.second, draws=7, at=at))
    assert caught.value.where.startswith(f"step {at}, rank 0, ")
    told = "all noise is another" if at == 0 else "counted by their records"
    assert told in caught.value.cause


def test_a_scale_that_follows_the_batch_is_found_and_named() -> None:
    first, second = (sum(case.local_sizes) for case in (PAIR.first, PAIR.second))
    assert first != second
    with pytest.raises(Violation) as caught:
        assert_same_noise(PAIR, side(PAIR.first), side(PAIR.second, scale=first / second))
    assert "divided by the number of samples of the whole batch" in caught.value.cause


def test_a_difference_as_small_as_the_sums_show_is_found() -> None:
    with pytest.raises(Violation):
        assert_same_noise(PAIR, side(PAIR.first), side(PAIR.second, scale=1 + 2.0**-44))


def test_gradients_of_other_parameters_and_noise_that_is_no_number_are_no_noise() -> None:
    def spoiled(change: float | None) -> Execution:
        loud = side(PAIR.second)[0]
        grads = loud.ranks[1].steps[1].grads
        assert grads is not None
        first = next(iter(grads))
        spoil(grads, first, change)
        return loud

    one, two = side(PAIR.first), side(PAIR.second)
    with pytest.raises(Violation, match="other forms"):
        assert_same_noise(PAIR, one, (spoiled(None), *two[1:]))
    with pytest.raises(Violation):
        assert_same_noise(PAIR, one, (spoiled(float("nan")), *two[1:]))


def spoil(grads: dict[str, Tensor], name: str, change: float | None) -> None:
    if change is None:
        del grads[name]
    else:
        grads[name] = grads[name] * change


def test_only_steps_that_are_alike_but_for_the_record_are_compared() -> None:
    assert replace(PAIR.first, layout=PAIR.second.layout) == PAIR.second
    assert PAIR.first.step.steps == 2
    answer = oracle.answer(PAIR.first)
    start, later = (step.before for step in answer.steps)
    assert all(torch.equal(value, later[name]) for name, value in start.items())
