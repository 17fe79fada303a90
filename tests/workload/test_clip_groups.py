"""Per-layer clipping: an instrument, a slack and a probe in each clipping group, and planted faults that they find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fsdpcheck import strategies
from fsdpcheck.adapters import load
from fsdpcheck.adapters.contract import FactorRule, Features, Promise
from fsdpcheck.case import Clipping, TrainingCase, Trait
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.impl.clipping import clip_factors, rules
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import clip_groups, models
from tests.common.answers import proved

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)))
RULE = FactorRule(eps=1e-6)
FEW = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def grouped(
    features: Features, family: Clipping, sizes: tuple[int, ...] = (1, 2, 3)
) -> st.SearchStrategy[TrainingCase]:
    """Cases that clip by unit."""
    drawn = strategies.cases_of(strategies.CaseSpace(clipping=(family,)), features, sizes)
    return drawn.filter(lambda case: case.step.clip_groups == "units")


@FEW
@given(grouped(EVERYTHING, "exact"))
def test_every_parameter_is_in_the_group_whose_prefix_it_has(case: TrainingCase) -> None:
    names = clip_groups.names(case)
    assert len(names) == len(case.model.units) + 1
    rule = rules.PerLayer(clip_groups.bounds(case, 3.0))
    shapes = models.parameter_shapes(case)
    assert list(shapes) == [name for name, _ in models.build(case).named_parameters()]
    assert [clip_groups.number(case, name) for name in shapes] == [rule.group_of(name) for name in shapes]
    instruments = [name for name in shapes if clip_groups.is_instrument(name)]
    assert tuple(instruments) == clip_groups.instruments(case)
    assert [rule.group_of(name) for name in instruments] == list(range(len(names)))


@pytest.mark.nightly
@FEW
@given(grouped(EVERYTHING, "exact"))
def test_the_slack_sets_the_norm_of_every_group(case: TrainingCase) -> None:
    """Each group's squared norm is a power of four, or C_l^2 at most; in each group a sample is clipped."""
    answer = proved(case, RULE)
    if answer is None:
        return
    scale = models.loss_scale(case)
    for step in answer.steps:
        assert torch.equal(step.group_squares.sum(1), step.squared_norms)
        for group, bound in enumerate(answer.clip_norms):
            own = clip_groups.members(case, step.gradients, group)
            squares = sum((g.flatten(1).square().sum(1) for g in own.values()), torch.zeros(len(step.samples)).double())
            assert torch.equal(squares, step.group_squares[:, group])
            assert all(s <= bound**2 or math.log2(s / scale**2) % 2 == 0 for s in squares.tolist())
            assert not step.samples or (step.factors[:, group] < 1).any()


@FEW
@given(grouped(EVERYTHING, "probe"))
def test_the_probe_of_each_group_reads_its_factors(case: TrainingCase) -> None:
    answer = proved(case, RULE)
    if answer is None:
        return
    for k, step in enumerate(answer.steps):
        assert step.factors.shape == (len(step.samples), len(answer.clip_norms))
        places = [sample - k * case.layout.batch_size for sample in step.samples]
        times = torch.tensor(step.multiplicity, dtype=torch.float64)
        for group, name in enumerate(clip_groups.instruments(case)):
            norms = step.group_squares[:, group].to(step.norms.dtype).sqrt()
            wanted = torch.div(torch.full_like(norms, answer.clip_norms[group]), norms + 1e-6).clamp(max=1.0)
            assert torch.equal(step.factors[:, group], wanted)
            read = step.clipped_sum[name][places, 0]
            assert torch.equal(read, wanted.double() * times * models.loss_scale(case))


def by_unit(name: str) -> Law:
    """A law, on its cases that clip by unit."""
    law = chapters()[name]

    def build(features: Features, sizes: tuple[int, ...]) -> st.SearchStrategy[TrainingCase]:
        return law.draw(features, sizes).filter(lambda case: case.step.clip_groups == "units")

    return replace(law, space=strategies.BuiltSpace(build=build))


HOLD = (
    "training.private-clipped", "training.private-gradients", "training.private-unclipped", "clipping.coefficients",
    "clipping.factors", "clipping.norms", "clipping.sum", "privacy.sensitivity", "privacy.independence",
    "privacy.noise", "privacy.collectives",
)  # fmt: skip

BY_DAY = ("training.private-clipped", "clipping.norms", "privacy.sensitivity")


@pytest.mark.parametrize(
    "adapter", ["reference:bookkeeping", pytest.param("reference_fsdp2:bookkeeping", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in HOLD]
)
def test_the_laws_hold_by_group(name: str, adapter: str, ranks_here: InProcessEngine) -> None:
    most = 7 if name.startswith("privacy.") else None  # each case of those is run twice
    verdict = check_law(by_unit(name), Run(ranks_here, adapter), "quick", (1, 2, 3), shrink=False, most=most)
    assert verdict.status == "holds", verdict
    assert verdict.census["per-layer-clipping"] == verdict.cases > 5


Factors = Callable[[Any, torch.Tensor], torch.Tensor]


def one_factor(self: Any, squares: torch.Tensor) -> torch.Tensor:
    """The smallest factor of a sample weighs all of its groups."""
    return PLAIN(self, squares).amin(0, keepdim=True).expand_as(squares)


def summed_norms(self: Any, squares: torch.Tensor) -> torch.Tensor:
    """Every group is clipped by the norm over all of them."""
    return PLAIN(self, squares.sum(0, keepdim=True).expand_as(squares))


def bounds_swapped(self: Any, squares: torch.Tensor) -> torch.Tensor:
    """The bounds belong to the groups in reverse."""
    rows = zip(squares.unbind(0), reversed(self.bounds.values()), strict=True)
    return torch.stack([clip_factors.factors(row, bound) for row, bound in rows])


def factors_swapped(self: Any, squares: torch.Tensor) -> torch.Tensor:
    """The factors of one group weigh the next."""
    return PLAIN(self, squares).roll(1, 0)


PLAIN: Factors = rules.PerLayer.factors
FAULTS: dict[Factors, str] = {
    one_factor: "the smallest of a sample's factors",
    summed_norms: "by the norm over all of them",
    bounds_swapped: "in reverse order",
    factors_swapped: "are those of the one before it",
}
"""What is planted, and what the cause that is named says."""
CATCH = ("training.private-clipped", "clipping.coefficients", "clipping.sum")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "training.private-clipped")) for name in CATCH]
)
def test_a_fault_of_grouping_is_found(name: str, ranks_here: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time; and the first case that breaks the law, which is not made smaller, tells one time of four why."""
    law, run = by_unit(name), Run(ranks_here, "reference:bookkeeping")
    for fault, why in FAULTS.items():
        monkeypatch.setattr(rules.PerLayer, "factors", fault)
        found = [check_law(law, run, world_sizes=(1, 2), shrink=False, seed=seed, most=5).finding for seed in range(4)]
        assert [one and one.kind for one in found] == ["value"] * 4, fault.__name__
        assert any(why in one.cause for one in found if one is not None), fault.__name__


@pytest.mark.nightly
def test_groups_that_each_have_the_whole_bound_break_the_sensitivity_and_no_more(ranks_here: InProcessEngine) -> None:
    """What a record weighs is still its own: only how far it moves the sum is wrong. Flat clipping knows no groups."""
    planted = Run(
        ranks_here, "reference:bookkeeping", installs=("fsdpcheck.impl.faults:each_group_has_the_whole_bound",)
    )
    verdict = check_law(by_unit("privacy.sensitivity"), planted, "quick", (1, 2), shrink=False)
    assert verdict.finding is not None
    assert "given the bound of all of them" in verdict.finding.cause
    verdict = check_law(by_unit("privacy.independence"), planted, "quick", (1, 2), shrink=False, most=4)
    assert verdict.status == "holds", verdict
    assert not verdict.reason, "the planted code was not reached"
    flat = replace(planted.features, accepts=planted.features.accepts - {"per-layer-clipping"})
    case = next(iter(enumeration.distinct(chapters()["privacy.sensitivity"].draw(flat, (2,)), 1)))
    assert check_case(chapters()["privacy.sensitivity"], planted, case).status == "holds"


def test_the_law_of_sensitivity_clips_a_third_of_its_cases_by_group() -> None:
    """Of the models that have units 2 in 3 are clipped so."""
    law, features = chapters()["privacy.sensitivity"], load("reference:bookkeeping").features
    drawn = enumeration.distinct(law.draw(features, (1, 2, 3)), 60)
    assert 3 * sum(case.step.clip_groups == "units" for case in drawn) >= len(drawn) == 60


def test_bookkeeping_is_not_asked_for_the_bits_of_a_second_backward() -> None:
    """It contracts activations and backprops with the factors: right, but rounded at other places."""
    law = chapters()["rounding.private-gradients"]
    assert law.not_promised(load("reference").features) == ""
    assert "contracts what the one backward kept" in law.not_promised(load("reference:bookkeeping").features)
    assert not chapters()["training.private-gradients"].not_promised(load("reference:bookkeeping").features)


def test_adapters_that_weigh_a_sample_once_are_given_no_such_case() -> None:
    for name in ("reference", "reference_fsdp2", "fully_shard", "fsdp1"):
        assert "per-layer-clipping" not in load(name).features.accepts
