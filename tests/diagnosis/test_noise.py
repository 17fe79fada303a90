"""What is wrong with noise is named: its scale, who draws it, and what its seed does not depend on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdpcheck import oracle
from fsdpcheck.adapters import load
from fsdpcheck.case import BatchLayout, MeshSpec
from fsdpcheck.checks import gaussian_limits
from fsdpcheck.checks.noise import FALSE_ALARM, noisy
from fsdpcheck.checks.noise_distribution import large
from fsdpcheck.diagnosis import noise, shards
from fsdpcheck.diagnosis.noise import Draw, Related, Scaled
from fsdpcheck.findings.cause import named
from fsdpcheck.oracle import Answer, Named
from tests.common.fabricated import clipped
from tests.common.later import later

LARGE, GROUPS, *_ = (later(case) for case in large(load("reference:bookkeeping").features, (1, 2, 3, 4, 5)))
N = 600 * 640
LIMITS = gaussian_limits.scale_limits(N, float(FALSE_ALARM))
FEW = later(noisy(clipped("exact"), 1))
ONE = later(replace(FEW.case, mesh=MeshSpec(1)))
SHAPES = {"w": torch.zeros(4, 2), "v": torch.zeros(4, 2)}


def _scaled(factor: float) -> str:
    return named(noise.of_scale(LARGE, factor, *LIMITS))


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (math.sqrt(5), "sqrt(W): each rank adds noise of the whole scale"),
        (5.0, "W: the same noise of every rank is summed"),
        (0.2, "1/W: noise is divided by the number of ranks once more"),
        (1 / 1.5, "1/s: the noise multiplier is left out"),
        (math.sqrt(2), "noise is added twice, each time another"),
        (2.0, "the same noise is added twice"),
        (float(LARGE.case.step.normaliser), "not divided by the normaliser"),
    ],
)
def test_a_scale_that_is_off_by_a_known_factor_is_named(factor: float, words: str) -> None:
    assert words in _scaled(factor)
    assert words in _scaled(factor * 1.001)  # what is measured is a sample
    assert words not in _scaled(factor * 1.03)


def test_a_scale_that_no_mistake_gives_is_told_as_a_number_only() -> None:
    assert _scaled(0.99) == "the noise is 0.99 times as large as s C / N"
    assert _scaled(0.0) == "no noise is added at all"


def _of(step: int, name: str, found: float, draws: int = 100) -> Scaled:
    return Scaled(step, name, draws, found, 0.5, 1.5)


def test_steps_and_parameters_whose_noise_stands_out_are_named() -> None:
    """By the largest parameter, where it is wrong anywhere; what is pooled names nobody."""
    right = [_of(0, "w", 1.0), _of(0, "b", 1.1, 10), _of(0, "", 0.9, 10), _of(1, "w", 1.0), _of(1, "b", 0.9, 10)]

    def said(*wrong: Scaled) -> str:
        places = [(each.step, each.parameter) for each in wrong]
        rest = [each for each in right if (each.step, each.parameter) not in places]
        return named(noise.of_scales(LARGE, [*rest, *wrong]))

    assert said() == said(_of(0, "", 0.1)) == ""
    assert said(_of(1, "w", 0.1), _of(1, "b", 0.1, 10)) == "the noise of step 1 is 0.1 times as large as s C / N"
    assert said(_of(0, "b", 0.1, 10), _of(1, "b", 0.1, 10)) == "the noise of b is 0.1 times as large as s C / N"
    both = said(_of(0, "w", 0.09), _of(1, "w", 0.09), _of(0, "b", 0.09, 10))
    assert both == "the noise is 0.09 times as large as s C / N"


def test_a_sensitivity_of_one_group_is_named() -> None:
    several = (max(GROUPS.clip_norms) / math.hypot(*GROUPS.clip_norms), "the largest C_l stands for the root")
    for ratio, words in (several, (sum(GROUPS.clip_norms) / math.hypot(*GROUPS.clip_norms), "the sum of the C_l")):
        assert words in named(noise.of_scale(GROUPS, ratio, *LIMITS))
        assert words not in named(noise.of_scale(LARGE, ratio, *LIMITS))


def test_draws_that_are_uniform_or_cut_off_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = (torch.rand(20_000, generator=generator, dtype=torch.float64) - 0.5) * math.sqrt(12)
    normal = torch.randn(20_000, generator=generator, dtype=torch.float64)
    assert named(noise.of_shape(uniform)) == "draws are uniform, not Gaussian"
    assert named(noise.of_shape(normal.clamp(-3, 3))) == "no draw is larger than 3 * s C / N"
    assert named(noise.of_shape(normal)) == ""
    two = torch.sign(normal)
    assert named(noise.of_shape(two)) == "no draw is larger than 1 * s C / N"


def test_related_noise_is_named_by_the_largest_parts_and_the_first_thing_in_which_they_differ() -> None:
    steps = Related("steps", "step 0, w", "step 1, w", 100, 0.5)
    small = Related("steps", "step 0, b", "step 1, b", 10, 0.9)
    shards = Related("shards", "step 0, w, share 0 of 2", "share 1", 50, 0.9)
    assert "the same in every step" in named(noise.of_related([shards, small, steps]))
    assert "step 0, w and step 1, w has a correlation of 0.5" in named(noise.of_related([shards, small, steps]))
    assert "the same in every shard" in named(noise.of_related([shards]))
    negated = steps._replace(found=-1.0)
    assert named(noise.of_related([negated])) == "the noise of step 1, w is that of step 0, w, negated"
    assert named(noise.of_related([negated._replace(found=1.0)])) == "the noise of step 1, w is that of step 0, w"


def _noisy(answer: Answer, drawn: Named) -> Named:
    return {name: value + drawn[name].to(value.dtype) for name, value in answer.steps[0].used.items()}


def _draws(answer: Answer, seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    scale = float(answer.clip_norm)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64) * scale
        for name, value in answer.steps[0].used.items()
    }


def test_shards_that_draw_from_the_beginning_are_named() -> None:
    fresh, alike = _draws(FEW, 0), _draws(FEW, 0)
    for name, value in alike.items():
        rows = -(-len(value) // 3)
        alike[name] = torch.cat([value[:rows]] * 3)[: len(value)]
    alone = (ONE, [_noisy(ONE, _draws(ONE, 1))])
    said = named(noise.of_siblings(alone, (FEW, [_noisy(FEW, alike)] * 3)))
    assert "each rank draws for its shard from the beginning" in said
    assert named(noise.of_siblings(alone, (FEW, [_noisy(FEW, fresh)] * 3))) == ""


def test_noise_that_grows_with_the_ranks_or_is_drawn_by_micro_batch_is_named() -> None:
    drawn = _draws(FEW, 0)
    body = {name: value / math.sqrt(3) for name, value in drawn.items()}
    first, second = (FEW, [_noisy(FEW, drawn)] * 3), (ONE, [_noisy(ONE, _like(ONE, body))])
    assert "multiplied by sqrt(W)" in named(noise.of_siblings(first, second))
    other = oracle.answer(replace(FEW.case, step=replace(FEW.case.step, micro_batches=1)))
    more = {name: value + _draws(FEW, 5)[name] for name, value in drawn.items()}
    first, second = (FEW, [_noisy(FEW, more)] * 3), (other, [_noisy(other, drawn)] * 3)
    assert "drawn in every micro-batch" in named(noise.of_siblings(first, second))
    half = {name: torch.where(torch.arange(len(value)).view(-1, *[1] * (value.dim() - 1)) > 0, more[name], value)
            for name, value in drawn.items()}  # fmt: skip
    assert named(noise.of_siblings((FEW, [_noisy(FEW, half)] * 3), second)) == ""


def _like(answer: Answer, drawn: Named) -> Named:
    """``drawn`` in the shapes of an answer whose instrument has other rows."""
    return {name: drawn[name][: len(value)] if len(drawn[name]) >= len(value) else torch.zeros_like(value)
            for name, value in answer.steps[0].used.items()}  # fmt: skip


def test_ranks_and_replicas_that_draw_for_themselves_are_named() -> None:
    mesh = replace(FEW.case, mesh=MeshSpec(2, 2))
    one, two, three, four = (_draws(FEW, seed) for seed in range(4))
    assert "replicas draw noise for themselves" in named(noise.of_ranks(mesh, [one, one, two, two]))
    assert "each rank has noise of its own" in named(noise.of_ranks(mesh, [one, two, three, four]))
    assert named(noise.of_ranks(mesh, [one, two, one, one])) == ""


def test_noise_whose_scale_follows_a_neighbouring_batch_is_named_by_what_is_counted() -> None:
    lists = (((0, 1, 2), (3,), (4, 5)), ((0, 1, 2), (), (4, 5)), ((0, 1), (3,), (4, 5)))
    first, fewer, shorter = (_listed(own) for own in lists)
    drawn = _draws(first, 0)

    def said(second: Answer, ratios: list[float]) -> str:
        owner = next(shards.owners(first.case, drawn))
        other = {name: value * torch.tensor(ratios, dtype=torch.float64)[owner[name]] for name, value in drawn.items()}
        return named(noise.of_neighbours((first, _noisy(first, drawn)), (second, _noisy(second, other)), 0))

    each = "the noise is divided by the number of samples that each rank has"
    assert each in said(shorter, [3 / 2, 1.0, 1.0])
    assert "divided by the number of samples of the whole batch" in said(fewer, [6 / 5] * 3)
    assert "multiplied by the number of samples of the whole batch" in said(fewer, [5 / 6] * 3)
    assert said(shorter, [4 / 3, 1.0, 1.0]) == ""
    assert said(shorter, [1.0, 3 / 2, 1.0]) == ""
    assert noise.of_neighbours((first, _noisy(first, drawn)), (fewer, _noisy(fewer, drawn)), 0) is None
    other = (fewer, _noisy(fewer, _draws(fewer, 1)))
    assert "what is drawn follows the batch" in named(noise.of_neighbours((first, _noisy(first, drawn)), other, 0))


def _listed(lists: tuple[tuple[int, ...], ...]) -> Answer:
    step = replace(FEW.case.step, micro_batches=1)
    return oracle.answer(replace(FEW.case, layout=BatchLayout("listed", 7, lists=lists), step=step))


def test_draws_used_twice_are_named_by_what_their_seed_does_not_depend_on() -> None:
    case = replace(FEW.case, mesh=MeshSpec(2))
    for here, before, words in (
        (Draw(1, "w", 3), Draw(0, "w", 3), "number of the step does not reach"),
        (Draw(0, "v", 3), Draw(0, "w", 3), "which parameter it is for does not reach"),
        (Draw(0, "w", 4), Draw(0, "w", 0), "draws for its shard from the beginning"),
        (Draw(0, "w", 1), Draw(0, "w", 0), "noise repeats within a parameter"),
    ):
        said = named(noise.of_used_twice(case, here, before, {"w": SHAPES["w"]}))
        assert words in said, said
    turned = named(noise.of_used_twice(case, Draw(1, "w", 3), Draw(0, "w", 3), SHAPES, negated=True))
    assert turned == "it is the draw of step 0, w, element 3, negated"
    assert named(noise.of_used_twice(case, Draw(1, "v", 3), Draw(0, "w", 2), SHAPES)).startswith("it is the draw of")


def test_noise_that_is_missing_is_named_by_where() -> None:
    case = replace(FEW.case, mesh=MeshSpec(2))
    full = {name: torch.ones(4, 2, dtype=torch.float64) for name in SHAPES}
    clean = {"w": torch.ones(4, 2), "v": torch.zeros(4, 2)}
    assert named(noise.of_missing(case, {name: value * 0 for name, value in full.items()}, clean)) == (
        "no noise is added at all"
    )
    told = {cause.key for cause in noise.of_missing(case, {**full, "v": full["v"] * 0}, clean)}
    assert {"noise where gradient", "no noise: parameters"} <= told
    half = {name: torch.cat([value[:2], value[2:] * 0]) for name, value in full.items()}
    assert "the shard of rank 1 gets no noise" in named(noise.of_missing(case, half, clean))
    spotted = {**full, "w": full["w"] * (torch.arange(8).view(4, 2) != 5)}
    assert named(noise.of_missing(case, spotted, clean)) == ""
