"""How noise is distributed: error rates by exact probabilities, and each thing that is wrong with made-up gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from fsdpcheck import oracle
from fsdpcheck.adapters import load
from fsdpcheck.case import TrainingCase, Trait
from fsdpcheck.checks import gaussian_limits
from fsdpcheck.checks.noise import FALSE_ALARM
from fsdpcheck.checks.noise_distribution import assert_noise_independent, assert_noise_scale, large
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Named, certificate

FEATURES = load("reference:bookkeeping").features
FIRST, GROUPS, REPLICATED, BY_REPLICA = large(FEATURES, (1, 2, 3, 4, 5))
SHARE = float(FALSE_ALARM) / (2 * (3 * 7 + 1))
"""Of one test of scale or shape in the case with most parameters."""
PAIR = float(FALSE_ALARM) / 200
N = 600 * 640
SIZES = (1, 4, 60, 600, N)


def outside(n: int, factor: float, alarm: float = SHARE) -> float:
    """Probability that n Gaussians of standard deviation ``factor`` leave the limits."""
    from scipy.stats import chi2

    low, high = (n * limit**2 / factor**2 for limit in gaussian_limits.scale_limits(n, alarm))
    return float(chi2.cdf(low, n) + chi2.sf(high, n))


def test_right_noise_is_called_wrong_no_more_often_than_is_said_and_one_percent_off_found_with_probability_99() -> None:
    for alarm in (SHARE, 1e-3):
        assert all(alarm / 30 <= outside(n, 1.0, alarm) <= alarm for n in SIZES)
    assert min(outside(N, 0.99), outside(N, 1.01)) >= 0.99
    assert outside(60, 0.1) >= 0.99


def test_the_limits_of_correlation_shape_and_largest_draw_have_the_probabilities_that_are_said() -> None:
    from scipy.stats import beta, kstwo, norm

    for alarm in (PAIR, 1e-3):
        for n in SIZES[1:]:
            limit = gaussian_limits.correlation_limit(n, alarm)
            assert limit >= 1 or 2 * beta.sf((1 + limit) / 2, (n - 1) / 2, (n - 1) / 2) <= alarm
            away = gaussian_limits.distance_limit(n, alarm)
            assert away >= 1 or n > 1000 or kstwo.sf(away, n) <= alarm
            low, high = gaussian_limits.largest_limits(n, alarm)
            below, above = (1 - 2 * norm.sf(low)) ** n, -math.expm1(n * math.log1p(-2 * norm.sf(high)))
            assert 0.99 * alarm <= below + above <= alarm * (1 + 1e-9)


def test_correlations_of_the_sizes_that_are_said_are_found_with_probability_99() -> None:
    """The correlation of n pairs is normal about the true one, with deviation (1 - r^2) / sqrt(n), for large n."""
    from scipy.stats import norm

    for n, true in ((N, 0.02), (N // 5, 0.04)):
        assert norm.sf(gaussian_limits.correlation_limit(n, PAIR), true, (1 - true**2) / math.sqrt(n)) >= 0.99


def test_distance_is_kolmogorovs_and_correlation_is_scale_free() -> None:
    from scipy.stats import kstest

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    assert gaussian_limits.distance(x) == pytest.approx(kstest(x.numpy(), "norm").statistic, abs=1e-12)
    assert gaussian_limits.correlation(x, 3 * x) == pytest.approx(1.0)
    assert gaussian_limits.correlation(x, y) == pytest.approx(gaussian_limits.correlation(x, 1e9 * y))
    assert gaussian_limits.correlation(x, 0 * y) == 0.0


@pytest.mark.parametrize("world_sizes", [(1,), (1, 2, 3, 4, 5), (3,), (7, 16)])
@pytest.mark.parametrize("adapter", ["reference", "reference:bookkeeping", "reference_fsdp2"])
def test_the_large_cases_release_nothing_but_noise_and_are_proved(adapter: str, world_sizes: tuple[int, ...]) -> None:
    features = load(adapter).features
    cases = large(features, world_sizes)
    for case in cases:
        assert case.requires() <= features.accepts
        assert case.world_size in world_sizes
        assert case.step.steps == 2
        answer = oracle.answer(case)
        certificate.prove(case, answer)
        assert not any(value.any() for step in answer.steps for value in step.used.values())
    assert sizes(answer)[-1] >= N
    assert sizes(answer)[0] < 10 < sizes(answer)[-3] < sizes(answer)[-2] < sizes(answer)[-1]


def sizes(answer: oracle.Answer) -> list[int]:
    return sorted(value.numel() for value in answer.steps[0].used.values())


@pytest.mark.parametrize(("accepted", "steps"), [({"project", "micro-batches", "bias"}, 2), (set(), 1)])
def test_where_no_rank_may_be_empty_every_rank_has_samples_and_no_parameter_moves(
    accepted: set[Trait], steps: int
) -> None:
    for case in large(replace(FEATURES, accepts=frozenset(accepted)), (3,)):
        assert case.requires() <= accepted
        answer = oracle.answer(case)
        certificate.prove(case, answer)
        assert (len(answer.steps), min(case.local_sizes)) == (steps, case.step.micro_batches)
        largest = max(answer.steps[0].used.values(), key=torch.Tensor.numel)
        assert largest.any()
        assert largest.numel() >= N
        first, last = answer.steps[0].before, answer.steps[-1].before
        assert all(torch.equal(last[name], value) for name, value in first.items())


def test_groups_replicas_and_shared_batches_are_drawn_where_they_are_accepted_and_nowhere_else() -> None:
    assert (FIRST.step.clip_groups, GROUPS.step.clip_groups) == ("all", "units")
    assert (FIRST.mesh.dp_replicate, GROUPS.mesh.dp_replicate) == (1, 2)
    assert [(case.layout.kind, case.copies) for case in (REPLICATED, BY_REPLICA)] == [
        ("replicated", 5),
        ("by-replica", 2),
    ]
    assert [case.step.contribution for case in (REPLICATED, BY_REPLICA)] == ["partial", "mixed"]
    complete = replace(FEATURES, promises=FEATURES.promises - {"partial-norms"})
    assert {case.step.contribution for case in large(complete, (1, 2, 3, 4, 5))} == {"complete"}
    few = replace(FEATURES, accepts=frozenset({"empty-rank"}))
    (only,) = large(few, (1, 2, 3, 4, 5))
    assert only.requires() == {"empty-rank"}


def test_noise_that_is_no_function_of_the_seed_is_judged_on_every_number_of_ranks() -> None:
    """Where it is, noise.world compares all of them bit for bit."""
    few = replace(FEATURES, accepts=frozenset({"empty-rank"}), promises=FEATURES.promises - {"noise-of-seed"})
    assert [case.world_size for case in large(few, (1, 2, 3, 4, 5, 13))] == [5, 4, 3, 2, 1]


@cache
def honest(case: TrainingCase) -> tuple[Named, ...]:
    """Honest noise of each step."""
    answer, generator = oracle.answer(case), torch.Generator().manual_seed(0)
    deviation = 1.5 * math.hypot(*answer.clip_norms) / case.step.normaliser
    return tuple(
        {
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64) * deviation
            for name, value in step.used.items()
        }
        for step in answer.steps
    )


def shown(case: TrainingCase, steps: tuple[Named, ...]) -> Execution:
    ranks = [RankResult(rank, {}, [StepRecord({}, own) for own in steps]) for rank in range(case.world_size)]
    return Execution("fabricated", RunRequest(case, "reference", clip_norm=oracle.answer(case).clip_norm), ranks)


def changed(case: TrainingCase, change: Callable[[int, str, torch.Tensor], torch.Tensor]) -> Execution:
    return shown(
        case, tuple({name: change(k, name, z) for name, z in own.items()} for k, own in enumerate(honest(case)))
    )


@pytest.mark.parametrize("case", [FIRST, GROUPS], ids=["flat", "groups"])
def test_honest_noise_is_called_right(case: TrainingCase) -> None:
    answer = oracle.answer(case)
    assert_noise_scale(shown(case, honest(case)), answer)
    assert_noise_independent(shown(case, honest(case)), answer)


W, B = "units.0.linear0.weight", "units.0.linear0.bias"
SCALES: dict[str, tuple[Callable[[int, str, torch.Tensor], torch.Tensor], str]] = {
    "2 % less": (lambda k, name, z: 0.98 * z, "step 0, every rank, " + W),
    "2 % more": (lambda k, name, z: 1.02 * z, "step 0, every rank, " + W),
    "none": (lambda k, name, z: 0 * z, "step 0, every rank, " + W),
    "biases": (lambda k, name, z: z / 10 if "bias" in name else z, "step 0, every rank, " + B),
    "a small bias": (lambda k, name, z: z / 10 if name == "units.1.linear1.bias" else z, "units.1.linear1.bias"),
    "later": (lambda k, name, z: z / 10 if k else z, "step 1, every rank, " + W),
    "small": (lambda k, name, z: 1.1 * z if name != W else z, "step 0, every rank"),
}


@pytest.mark.parametrize("fault", SCALES)
def test_noise_of_another_scale_anywhere_is_found(fault: str) -> None:
    change, where = SCALES[fault]
    with pytest.raises(Violation, match="the noise has the wrong scale") as caught:
        assert_noise_scale(changed(FIRST, change), oracle.answer(FIRST))
    assert where in caught.value.where


def test_the_scale_of_groups_is_the_root_of_the_sum_of_their_squares() -> None:
    norms = oracle.answer(GROUPS).clip_norms
    for wrong in (max(norms), sum(norms), norms[-1]):
        with pytest.raises(Violation, match="wrong scale"):
            assert_noise_scale(
                changed(GROUPS, lambda k, name, z, wrong=wrong: z * wrong / math.hypot(*norms)), oracle.answer(GROUPS)
            )


def deviation() -> float:
    return 1.5 * oracle.answer(FIRST).clip_norm / FIRST.step.normaliser


def uniform(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    return (torch.special.ndtr(z / deviation()) - 0.5) * math.sqrt(12) * deviation()


def cut(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    """At three deviations: 0.27 % of all draws, and half a percent of the variance."""
    return z.clamp(-3 * deviation(), 3 * deviation()) if name == W else z


@pytest.mark.parametrize("change", [uniform, cut, lambda k, name, z: z.sign() * deviation()])
def test_another_distribution_of_the_right_scale_is_found(
    change: Callable[[int, str, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(Violation, match="the noise is not Gaussian"):
        assert_noise_scale(changed(FIRST, change), oracle.answer(FIRST))


def shared(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    return honest(FIRST)[0][name] * math.sqrt(0.99) + z * 0.1 if k else z


def negated(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    return -honest(FIRST)[0][name] if k else z


def bias_of_the_weight(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    return -honest(FIRST)[k][W].flatten()[: len(z)] if name == B else z


def halves(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    """Shards of two ranks of five: half of the variance is common."""
    if name != W:
        return z
    first, second, *rest = z.chunk(5)
    return torch.cat([first, (first + second) * math.sqrt(0.5), *rest])


def rows(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    """Rows 2k + 1 have 4 % of what rows 2k have: elements that lie side by side know nothing of one another."""
    return z if name != W else torch.stack([z[::2], z[1::2] + 0.04 * z[::2]], 1).reshape(z.shape)


def elements(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    flat = z.flatten()
    return z if name != W else torch.stack([flat[::2], flat[1::2] - 0.04 * flat[::2]], 1).view(z.shape)


def far(k: int, name: str, z: torch.Tensor) -> torch.Tensor:
    """Whose places in a parameter differ in their 17th bit alone have 4 % in common."""
    if name != W:
        return z
    flat, apart = z.flatten().clone(), 1 << 16
    pairs = flat[: 4 * apart].view(-1, 2, apart)
    pairs[:, 1] += 0.04 * pairs[:, 0]
    return flat.view(z.shape)


@pytest.mark.parametrize(
    ("change", "where", "cause"),
    [
        (shared, "step 0, units.0.linear0.weight against step 1", "a part of each draw is the same in every step"),
        (negated, "step 0, units.0.linear0.weight against step 1", "negated"),
        (bias_of_the_weight, f"step 0, {W} against step 0, {B}", "negated"),
        (halves, f"step 0, {W}, share 0 of 5 against share 1", "the same in every shard"),
        (rows, "rows 0, 2, ... against rows 1, 3", "neighbouring rows"),
        (elements, "elements 0, 2, ... against elements 1, 3", "neighbouring elements"),
        (far, "elements i against elements i + 65536", "elements that far from one another"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_noise_that_tells_of_other_noise_is_found(
    change: Callable[[int, str, torch.Tensor], torch.Tensor], where: str, cause: str
) -> None:
    answer = oracle.answer(FIRST)
    with pytest.raises(Violation, match="noise tells of other noise") as caught:
        assert_noise_independent(changed(FIRST, change), answer)
    assert where in caught.value.where
    assert cause in caught.value.cause


def test_a_scale_that_is_wrong_is_not_called_dependence_and_dependence_no_wrong_scale() -> None:
    answer = oracle.answer(FIRST)
    assert_noise_independent(changed(FIRST, SCALES["later"][0]), answer)
    assert_noise_scale(changed(FIRST, negated), answer)


def test_ranks_that_show_other_noise_are_found_first() -> None:
    execution = shown(FIRST, honest(FIRST))
    record = execution.ranks[1].steps[1]
    execution.ranks[1].steps[1] = StepRecord({}, {**(record.grads or {}), W: (record.grads or {})[W] * 1.0001})
    for judge in (assert_noise_scale, assert_noise_independent):
        with pytest.raises(Violation, match="the ranks have different noise") as caught:
            judge(execution, oracle.answer(FIRST))
        assert "step 1, rank 1 against rank 0" in caught.value.where
