"""Checks of noise: error rates by exact probabilities, and each thing that is wrong with fabricated gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fsdpcheck.case import BatchLayout, LayerSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks import noise_draws
from fsdpcheck.checks.noise import FALSE_ALARM, assert_noise_in_full_precision, assert_noise_once
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import answer

CASE = TrainingCase(
    ModelSpec((LayerSpec(2, frozen="bias", bias=True),)),
    layout=BatchLayout(batch_size=2),
    step=StepSpec("linear", clipping="exact", noise_multiplier=1.5),
)


def run(case: TrainingCase, *grads: dict[str, Tensor], moved: float = 0.0) -> Execution:
    """One rank that shows ``grads`` step by step; its frozen bias moves by ``moved``."""
    before = {"tail.linear0.bias": torch.zeros(2)}
    after = {"tail.linear0.bias": torch.zeros(2) + moved}
    case = replace(case, step=replace(case.step, steps=len(grads)))
    result = RankResult(0, before, [StepRecord(after, own) for own in grads])
    return Execution("fabricated", RunRequest(case, "reference", clip_norm=1.0), [result])


def gradient(*values: float) -> dict[str, Tensor]:
    return {"tail.linear0.weight": torch.tensor(values, dtype=torch.float64)}


def test_noise_that_is_missing_repeated_or_on_frozen_parameters_is_found() -> None:
    clean = run(CASE, gradient(1.0, 2.0), gradient(5.0, 6.0))
    assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.0, 8.0)), clean)
    with pytest.raises(Violation, match="has no noise"):
        assert_noise_once(run(CASE, gradient(1.5, 2.0), gradient(4.0, 8.0)), clean)
    with pytest.raises(Violation, match="used twice") as caught:
        assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.0, 6.5)), clean)
    assert caught.value.cause == "it is the draw of step 0, tail.linear0.weight, element 0"
    with pytest.raises(Violation, match="used twice") as caught:
        assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.5, 8.0)), clean)
    assert caught.value.cause == "it is the draw of step 0, tail.linear0.weight, element 0, negated"
    with pytest.raises(Violation, match="a frozen parameter moved"):
        assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.0, 8.0), moved=1.0), clean)


def test_a_trained_parameter_without_a_gradient_has_no_noise() -> None:
    clean, noisy = run(CASE, {}), run(CASE, {})
    noisy.ranks[0].initial["tail.linear0.weight"] = torch.zeros(2, 1)
    with pytest.raises(Violation, match="a trained parameter has no noise") as caught:
        assert_noise_once(noisy, clean)
    assert caught.value.where == "step 0, rank 0, tail.linear0.weight"
    with pytest.raises(Violation, match="another form"):
        assert_noise_once(noisy, run(CASE, gradient(1.0, 2.0)))


def normal(seed: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shown(*steps: dict[str, Tensor]) -> Execution:
    return run(CASE, *steps)


HEAVY = math.pi * 2.0**20
"""What a gradient of another size is multiplied by: sums lose 20 bits of the noise."""


@pytest.mark.parametrize("where", ["parameters", "steps", "elements"])
def test_a_draw_used_twice_is_seen_through_sums_of_another_size(where: str) -> None:
    """A draw added to small gradients and to large ones is rounded differently, in every element."""
    z, other, light, heavy = normal(1, 8), normal(2, 8), normal(3, 8), normal(4, 8) * HEAVY
    clean = {
        "parameters": ({"a": light, "b": heavy},),
        "steps": ({"a": light}, {"a": heavy}),
        "elements": ({"a": torch.cat([light, heavy])},),
    }[where]
    for again, wrong in ((z, True), (-z, True), (other, False)):
        noise = {
            "parameters": ({"a": z, "b": again},),
            "steps": ({"a": z}, {"a": again}),
            "elements": ({"a": torch.cat([z, again])},),
        }[where]
        noisy = [{name: own[name] + more[name] for name in own} for own, more in zip(clean, noise, strict=True)]
        if not wrong:
            assert_noise_once(shown(*noisy), shown(*clean))
            continue
        differences = {
            value
            for step, own in zip(noisy, clean, strict=True)
            for name in own
            for value in (step[name] - own[name]).tolist()
        }
        assert len(differences) == 16  # no two have equal bits
        with pytest.raises(Violation, match="used twice"):
            assert_noise_once(shown(*noisy), shown(*clean))


@pytest.mark.parametrize("divisor", [1, 3, 32])
def test_every_draw_lies_within_the_room_of_its_rounding(divisor: int) -> None:
    """Added to a gradient, or to the sum it is the quotient of; sums of 2^-30 to 2^30 times the noise."""
    sums, z = normal(1, 4000) * 2.0 ** torch.arange(-30, 30, 60 / 4000), normal(2, 4000)
    clean = sums / divisor
    drawn = (sums + z) / divisor - clean
    rooms, _ = noise_draws.rooms_of(drawn, clean, 1 / divisor, 2.0**-53, FALSE_ALARM)
    exact = [abs(Fraction(d) - Fraction(one) / divisor) for d, one in zip(drawn.tolist(), z.tolist(), strict=True)]
    assert all(found <= Fraction(room) for found, room in zip(exact, rooms.tolist(), strict=True))
    largest = max(found / Fraction(room) for found, room in zip(exact, rooms.tolist(), strict=True))
    assert largest > Fraction(1, 8)  # it is the rounding that is bounded


def test_honest_draws_meet_no_more_often_than_is_said() -> None:
    """With roundings as coarse as 2^-20, so that chance can be counted."""
    unit, found, told = 2.0**-20, 0, 0.0
    for seed in range(200):
        drawn, clean = normal(seed, 60), torch.zeros(60, dtype=torch.float64)
        rooms, meetings = noise_draws.rooms_of(drawn, clean, 1.0, unit, FALSE_ALARM)
        near = (drawn.abs()[:, None] - drawn.abs()).abs() <= rooms[:, None] + rooms
        found += (int(near.sum()) - 60) // 2
        told += meetings
    assert 0 < found <= told


def test_where_chance_is_common_more_than_one_meeting_is_needed() -> None:
    assert noise_draws.needed(1e-7, FALSE_ALARM) == 1
    for meetings in (1e-5, 0.1, 3.0):
        count = noise_draws.needed(meetings, FALSE_ALARM)
        assert meetings**count / math.factorial(count) <= FALSE_ALARM / 2
        assert meetings ** (count - 1) / math.factorial(count - 1) > FALSE_ALARM / 2
    z, clean = normal(1, 40), torch.zeros(80, dtype=torch.float64)
    once = torch.cat([z, z[:1], normal(2, 39)])
    for unit, wanted in ((2.0**-53, (0, 40)), (2.0**-22, None)):
        assert noise_draws.used_twice(once, clean, 1.0, unit, FALSE_ALARM) == wanted
    assert noise_draws.used_twice(torch.cat([z, z]), clean, 1.0, 2.0**-22, FALSE_ALARM) == (0, 40)


def test_noise_of_unknown_scale_is_not_judged() -> None:
    clean = run(CASE, gradient(1.0, 2.0))
    noisy = run(CASE, gradient(1.5, 2.25))
    noisy.request = replace(noisy.request, clip_norm=math.inf)
    with pytest.raises(UsageError, match="clip norm"):
        assert_noise_once(noisy, clean)


def test_noise_of_few_bits_is_found_and_of_fewer_than_four_elements_nothing_is_said() -> None:
    solution = answer(CASE)

    def judge(*noise: float) -> None:
        clean = gradient(*[1.0] * len(noise))
        step = replace(solution.steps[0], released=clean)
        noisy = {name: value + torch.tensor(noise, dtype=torch.float64) for name, value in clean.items()}
        assert_noise_in_full_precision(run(CASE, noisy), replace(solution, steps=(step,)))

    judge(*normal(1, 4).tolist())
    with pytest.raises(Violation, match="not drawn and added"):
        judge(0.5, 1.25, -2.0, 0.25)
    with pytest.raises(NotExact, match="fewer than 4 elements"):
        judge(0.1, 0.2, 0.3)
