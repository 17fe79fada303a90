"""Samples taken together where each is to be taken alone are named; so is precision that gradients lose on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdpcheck import diagnosis, oracle
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis.cause_fit import chunks, rows
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.cause import named
from fsdpcheck.findings.tokens import decode
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import Named
from tests.common.fabricated import SMALL, clipped, right_weights, weighted
from tests.common.later import later

EPS = FactorRule(eps=1e-6)
PROBE = later(clipped("probe"), EPS)
PLAIN = later(SMALL)
TOYS = f"{Path(__file__).parents[1]}/toys/clips_together.py"
ALONE = "clip each sample's gradient"


def _sum(groups: list[list[int]], scale: float) -> Named:
    """The released gradient of sums over groups of rows, each times ``scale`` clipped as one."""
    total = {name: torch.zeros_like(value[0]) for name, value in PROBE.steps[0].gradients.items()}
    for own in groups:
        group = {name: value[own].sum(0) for name, value in PROBE.steps[0].gradients.items()}
        norm = torch.stack([value.square().sum() for value in group.values()]).sum().sqrt() * scale
        factor = min(1.0, PROBE.clip_norm / (float(norm) + 1e-6)) / PROBE.case.step.normaliser
        total = {name: value + group[name] * factor for name, value in total.items()}
    return total


def test_a_gradient_that_is_clipped_after_samples_were_added_up_is_named() -> None:
    by_rank = rows(SMALL, 0, PROBE.steps[0])
    whole = [[row for own in by_rank for row in own]]
    micro = [own for mine in chunks(SMALL, 0, PROBE.steps[0]) for own in mine]
    for groups, scale, words in (
        (whole, 1 / 8, "the mean gradient of the whole batch"),
        (whole, 1.0, "the summed gradient of the whole batch"),
        (by_rank, 3 / 8, "the mean gradient of each rank"),
        (micro, 1.0, "the summed gradient of each micro-batch is"),
    ):
        said = named(diagnosis.of_gradient(PROBE, 0, _sum(groups, scale)))
        assert words in said, said
        assert ALONE in said


def test_a_case_that_cannot_tell_whose_gradient_is_clipped_speaks_for_each_and_says_the_plainest() -> None:
    alone = clipped("probe", replace(SMALL, mesh=replace(SMALL.mesh, dp_shard=1)), micro_batches=1)
    answer = oracle.answer(alone, EPS)
    whole = {name: value.sum(0) for name, value in answer.steps[0].gradients.items()}
    norm = torch.stack([value.square().sum() for value in whole.values()]).sum().sqrt() / 8
    factor = min(1.0, answer.clip_norm / (float(norm) + 1e-6)) / 8
    fitting = diagnosis.of_gradient(answer, 0, {name: value * factor for name, value in whole.items()})
    assert fitting is not None
    keys = {cause.key for cause in fitting}
    assert {f"{word} gradient of {whose} clipped" for word in ("mean", "scaled mean")
            for whose in ("the whole batch", "each rank")} <= keys  # fmt: skip
    assert "each rank" not in named(fitting)


def test_samples_that_are_clipped_alone_but_wrongly_are_not_said_to_be_clipped_together() -> None:
    weights = right_weights(PROBE)
    for changed in (weights * 0.75, weights.sqrt(), weights * torch.linspace(0.5, 1.5, 7)):
        assert ALONE not in named(diagnosis.of_gradient(PROBE, 0, weighted(PROBE, changed)))


def test_norms_of_whole_micro_batches_and_of_pairs_are_named() -> None:
    mine = chunks(SMALL, 0, PROBE.steps[0])[0]
    whole = PROBE.steps[0].norms.clone()
    for own in mine:
        squares = [value[own].sum(0).square().sum() for value in PROBE.steps[0].gradients.values()]
        whole[own] = torch.stack(squares).sum().sqrt()
    every = [row for own in mine for row in own]
    said = named(diagnosis.of_norms(PROBE, 0, 0, whole[every]))
    assert "norm of the gradient of the whole micro-batch, not its own" in said
    paired = PROBE.steps[0].squared_norms.clone()
    for own in mine:
        paired[own[:2]] = PROBE.steps[0].squared_norms[own[:2]].mean()
    assert "two samples that follow each other share" in named(diagnosis.of_norms(PROBE, 0, 0, paired.sqrt()[every]))
    louder = PROBE.steps[0].norms[every] * 1.25
    assert named(diagnosis.of_norms(PROBE, 0, 0, louder)) == ""


def test_a_clip_norm_that_follows_the_batch_is_named() -> None:
    answer = oracle.answer(clipped("probe", clip_norm=1024), EPS)
    step = answer.steps[0]
    factors = step.factors.clone()
    for own in (own for mine in chunks(SMALL, 0, step) for own in mine):
        if len(own) > 1:
            limit = min(answer.clip_norm, float(step.norms[own].median()))
            factors[own] = (limit / (step.norms[own] + 1e-6)).clamp(max=1)
    assert not torch.equal(factors, step.factors)
    assert "lowered to the median norm" in named(diagnosis.of_gradient(answer, 0, weighted(answer, factors / 8)))
    lower = (0.75 * answer.clip_norm / (step.norms + 1e-6)).clamp(max=1)
    assert named(diagnosis.of_gradient(answer, 0, weighted(answer, lower / 8))) == ""


def test_micro_batches_that_are_counted_again_and_odd_rows_are_named() -> None:
    case = replace(SMALL, step=replace(SMALL.step, micro_batches=3))
    answer = oracle.answer(case)
    counts = torch.zeros(7, dtype=torch.float64)
    kept = torch.ones(7, dtype=torch.float64)
    for mine in chunks(case, 0, answer.steps[0]):
        for number, own in enumerate(mine):
            counts[own] = 3.0 - number
    said = named(diagnosis.of_gradient(answer, 0, weighted(answer, right_weights(answer) * counts)))
    assert "later reductions add them again" in said
    single = oracle.answer(replace(SMALL, step=replace(SMALL.step, micro_batches=1)))
    kept[rows(SMALL, 0, PROBE.steps[0])[0][-1]] = 0  # the ranks have 3, 2 and 2 samples
    said = named(diagnosis.of_gradient(single, 0, weighted(single, right_weights(single) * kept)))
    assert "of 3, 5, ... samples is left out" in said


def test_gradients_of_fewer_bits_are_named_by_unit_and_type() -> None:
    right = PLAIN.steps[0].released
    unit = [name for name in right if name.startswith("units.0")]

    def rounded(bits: int) -> Named:
        found = {name: value.clone() for name, value in right.items()}
        for name in unit:
            mantissa, exponent = torch.frexp(right[name])
            found[name] = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
        return found

    assert any(not torch.equal(value, right[name]) for name, value in rounded(3).items())
    said = named(diagnosis.of_gradient(PLAIN, 0, rounded(3)))
    assert "gradients of units.0 are rounded to 3 bits, the precision of float8_e5m2" in said
    assert "precision" not in named(diagnosis.of_gradient(PLAIN, 0, {n: v * 1.5 for n, v in right.items()}))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "whose"),
    [("mean", "the whole batch"), pytest.param("mean_of_each_rank", "each rank", marks=pytest.mark.nightly)],
)
def test_the_beginners_step_is_named_and_a_replay_names_it_too(name: str, whose: str) -> None:
    engine = SimulatedEngine()
    try:
        run, law = Run(engine, f"{TOYS}:{name}"), chapters()["clipping.sum"]
        found = check_law(law, run, world_sizes=(2, 3), most=6).finding
        assert found is not None
        assert found.cause == f"the mean gradient of {whose} is clipped, not each sample's: {ALONE}, then add them up"
        case: TrainingCase = decode(found.token).case
        again = check_case(law, run, case).finding
        assert again is not None
        assert (again.cause, again.got, again.words) == (found.cause, found.got, found.words)
        silent = check_case(law, run, case, diagnose=False).finding
        assert silent is not None
        assert silent.cause == ""
    finally:
        engine.close()
