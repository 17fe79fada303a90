"""A planted mistake is named; no mistake, an unknown one, or one that several causes fit, is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdpcheck import diagnosis, oracle
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, TrainingCase
from fsdpcheck.checks._read import local_rows
from fsdpcheck.diagnosis import cause_fit
from fsdpcheck.diagnosis.cause_fit import fits
from fsdpcheck.findings.cause import DID_NOT_MOVE, EXACT, WEAK, named
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload import batches
from tests.common.fabricated import SMALL, clipped, right_weights, weighted
from tests.common.later import later
from tests.common.tables import each

EPS = FactorRule(eps=1e-6)
PLAIN = later(replace(SMALL, step=replace(SMALL.step, optimizer=OptimizerSpec(momentum=0.5, weight_decay=0.25))))
PROBE = later(clipped("probe"), EPS)


def _said(answer: Answer, gradient: Named) -> list[str]:
    """What is said of a wrong gradient, seen as a gradient and seen through the parameters."""
    params = oracle.update(answer.case, answer.steps[0].before, gradient)
    return [named(diagnosis.of_gradient(answer, 0, gradient)), named(diagnosis.of_update(answer, 0, params))]


def _all_name(answer: Answer, weights: Tensor, *words: str) -> None:
    for said in _said(answer, weighted(answer, weights)):
        assert all(word in said for word in words), (said, words)


@each(
    ("name", "ratio"),
    [("W", 3.0), ("1/W", 1 / 3), ("sqrt(W)", math.sqrt(3)), ("1/sqrt(W)", 3**-0.5), ("W^2", 9.0), ("K", 2.0)],
)
@each("answer", [PLAIN, PROBE], ids=["plain", "probe"])
def test_ratios_are_named(answer: Answer, name: str, ratio: float) -> None:
    _all_name(answer, right_weights(answer) * ratio, f"exactly {name} =")


def test_micro_batches_ranks_and_local_means_are_named() -> None:
    weights = right_weights(PLAIN)
    chunks = batches.indices(SMALL, 0)
    first = torch.tensor([float(any(row in own[0] for own in chunks)) for row in range(7)])
    _all_name(PLAIN, weights * first, "only the first micro-batch counts")
    mine = torch.tensor([float(any(row in chunk for chunk in chunks[1])) for row in range(7)])
    _all_name(PLAIN, weights * mine, "only the samples of rank 1 count: not reduced")
    sizes = torch.tensor([3.0 if row % 3 == 0 else 2.0 for row in range(7)])
    _all_name(PLAIN, weights * 8 / (3 * sizes), "local means are averaged")


@pytest.mark.parametrize("mesh", [MeshSpec(3), MeshSpec(2, 2)], ids=["sharded", "hsdp"])
def test_ranks_and_micro_batches_are_named_by_their_own_gradients(mesh: MeshSpec) -> None:
    case = replace(SMALL, mesh=mesh)
    generator, shapes = torch.Generator().manual_seed(0), PLAIN.steps[0].used
    terms = [[{name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
               for name, value in shapes.items()} for _ in range(2)] for _ in range(case.world_size)]  # fmt: skip

    def said(own: list[Named], world: int = case.world_size, unit: Named | None = None) -> str | None:
        got = {name: torch.stack([term[name] for term in own]).sum(0) / world for name in shapes}
        causes = diagnosis.of_terms(case, got | (unit or {}), terms, iter(()))
        return None if causes is None else named(causes)

    every = [term for mine in terms for term in mine]
    assert said(every) is None
    assert said(every, world=5) == ""
    assert said([mine[-1] for mine in terms]) == "only the last micro-batch counts, of 2"
    assert said(terms[1]) == "only the samples of rank 1 count: not reduced over the ranks"
    assert said(terms[1], world=1) == "only the samples of rank 1 count: W times them"
    replica = "only the samples of replica 0 count: gradients are not reduced over the replicas"
    assert (said(every[:4], world=2) == replica) == (mesh.dp_replicate == 2)
    by_row = {name: torch.stack([mine[0][name][row] + mine[1][name][row] for row, mine in enumerate(terms[:3])])
              for name in shapes if name.startswith("units.1.")}  # fmt: skip
    local = "gradients of units.1 are not reduced over the ranks: each shard has its own rank's only"
    assert (said(every, unit=by_row) == local) == (mesh.dp_shard == 3)


def test_clipping_gone_wrong_is_named() -> None:
    step = PROBE.steps[0]
    share = 1 / PROBE.case.step.normaliser
    _all_name(PROBE, torch.full((7,), share), "not clipped at all")
    _all_name(PROBE, right_weights(PROBE) + share, "unclipped gradient leaked")
    bias = step.gradients["units.1.linear1.bias"].square().sum(1)
    short = oracle.factors((step.squared_norms - bias).sqrt(), PROBE.clip_norm, EPS)
    _all_name(PROBE, short * share, "units.1.linear1.bias is left out of the norm")
    tall = oracle.factors(step.norms * math.sqrt(3), PROBE.clip_norm, EPS)
    _all_name(PROBE, tall * share, "norms are exactly sqrt(W)")


def test_norms_mixed_by_position_are_named_in_gradients_norms_and_factors() -> None:
    step = PROBE.steps[0]
    rows = [local_rows(PROBE.case, 0, rank, step.samples) for rank in range(3)]
    mixed = step.squared_norms.clone()
    for position in range(3):
        together = [own[position] for own in rows if position < len(own)]
        mixed[together] = step.squared_norms[together].sum()
    factors = oracle.factors(mixed.sqrt(), PROBE.clip_norm, EPS)
    _all_name(PROBE, factors / 8, "by position")
    assert "by position" in named(diagnosis.of_norms(PROBE, 0, 0, mixed.sqrt()[rows[0]]))
    assert "by position" in named(diagnosis.of_factors(PROBE, 0, 0, factors[rows[0]]))


def test_another_clip_norm_is_named_where_two_samples_show_it() -> None:
    mine = [row for chunk in batches.indices(PROBE.case, 0)[0] for row in chunk]
    norms = PROBE.steps[0].norms[mine]
    halved = oracle.factors(norms, PROBE.clip_norm / 2, EPS)
    assert sum(halved < 1) > 1
    assert "samples are clipped to 0.5 times the clip norm" in named(diagnosis.of_factors(PROBE, 0, 0, halved))
    odd = oracle.factors(norms, PROBE.clip_norm * 0.777, EPS)
    assert "the clip norm" not in named(diagnosis.of_factors(PROBE, 0, 0, odd))


def test_norms_mixed_by_position_are_named_where_the_ranks_share_a_sample() -> None:
    layout = BatchLayout("sampler", 5)
    answer = oracle.answer(replace(clipped("probe"), layout=layout, mesh=MeshSpec(2)), EPS)
    rows = [batches.indices(answer.case, 0)[rank] for rank in (0, 1)]
    first, second = ([row for chunk in own for row in chunk] for own in rows)
    assert set(first) & set(second), "the sampler wraps around"
    squares = answer.steps[0].squared_norms
    assert "by position" in named(diagnosis.of_norms(answer, 0, 0, (squares[first] + squares[second]).sqrt()))


def test_right_norms_and_factors_are_no_evidence() -> None:
    mine = [row for chunk in batches.indices(PROBE.case, 0)[0] for row in chunk]
    assert diagnosis.of_norms(PROBE, 0, 0, PROBE.steps[0].norms[mine]) is None
    assert diagnosis.of_factors(PROBE, 0, 0, PROBE.steps[0].factors[mine]) is None


def test_eps_gone_wrong_is_named() -> None:
    step, rows = PROBE.steps[0], local_rows(PROBE.case, 0, 0, PROBE.steps[0].samples)
    clip = PROBE.clip_norm
    assert "eps = 0 stands beside" in named(diagnosis.of_factors(PROBE, 0, 0, (clip / step.norms).clamp(max=1)[rows]))
    inside = (clip / (step.squared_norms + 1e-6).sqrt()).clamp(max=1)
    assert "eps = 1e-06 is added to the squared norm" in named(diagnosis.of_factors(PROBE, 0, 0, inside[rows]))


def test_an_undeclared_expression_of_right_factors_is_named() -> None:
    case = clipped("probe")
    case = replace(case, step=replace(case.step, clip_norm=3))  # scaling by a power of two would round nothing
    right, other = oracle.answer(case), oracle.answer(case, FactorRule(expression="reciprocal"))
    everywhere = [(rank, local_rows(case, 0, rank, right.steps[0].samples)) for rank in range(case.world_size)]
    declare = "declare FactorRule(expression='reciprocal')"

    def said(found: Answer) -> list[str]:
        factors = found.steps[0].factors
        by_rank = [named(diagnosis.of_factors(right, 0, rank, factors[rows])) for rank, rows in everywhere]
        updated = named(diagnosis.of_update(right, 0, found.steps[0].after))
        return ["".join(by_rank), named(diagnosis.of_gradient(right, 0, found.steps[0].released)), updated]

    assert all(declare in text for text in said(other))
    assert not any(declare in text for text in said(right))


def test_global_norms_gone_wrong_are_named() -> None:
    step = PLAIN.steps[0]
    norm = float(step.grad_norm)
    assert "exactly sqrt(W) =" in named(diagnosis.of_grad_norm(PLAIN, 0, 0, norm * math.sqrt(3)))
    own = math.sqrt(sum(float(value[: -(-len(value) // 3)].square().sum()) for value in step.released.values()))
    assert "its own shard alone" in named(diagnosis.of_grad_norm(PLAIN, 0, 0, own))
    assert diagnosis.of_grad_norm(PLAIN, 0, 0, norm * 1.01) == []
    squares = {name: float(value.square().sum()) for name, value in step.released.items()}
    left = next(iter(squares))
    rest = math.sqrt(sum(square for name, square in squares.items() if name != left))
    assert f"the gradient of {left} is left out of it" in named(diagnosis.of_grad_norm(PLAIN, 0, 0, rest))
    assert diagnosis.of_grad_norm(PLAIN, 0, 0, math.nan) == []


def test_norms_of_parts_are_named_whatever_the_parts_are() -> None:
    """Two of three ranks' parts are no shards that are known; the right norm, or equal ones, have no parts."""
    step, limit = PLAIN.steps[0], 1.0
    norm = float(step.grad_norm)
    parts = [norm * part for part in (0.48, 0.6, 0.64)]  # a Pythagorean box
    said = named(diagnosis.of_grad_norm(PLAIN, 0, 1, parts[1], parts))
    assert said == "each rank's norm is that of its own shard alone: not summed over the ranks"
    assert diagnosis.of_grad_norm(PLAIN, 0, 1, parts[1], [parts[1]] * 3) == []
    assert diagnosis.of_grad_norm(PLAIN, 0, 1, parts[1], [parts[1], norm, norm]) == []
    clipping = oracle.answer(replace(SMALL, step=replace(SMALL.step, max_grad_norm=limit)))
    own = clipping.steps[0]
    by = [oracle.global_factor(own.grad_norm * part, limit, 0.0) for part in (0.48, 0.6, 0.64)]
    mixed = {
        name: value * torch.stack(by)[torch.arange(value.numel()).view(value.shape) % 3]
        for name, value in own.released.items()
    }
    got = oracle.update(clipping.case, own.before, mixed)
    first, *others = (float(own.grad_norm) * part for part in (0.48, 0.6, 0.64))
    assert named(diagnosis.of_clipped_update(clipping, 0, got, first, 0.0, others)) == said  # one root
    said = named(diagnosis.of_clipped_update(clipping, 0, got, first, 0.0, [*others, others[0]]))
    assert said == "each rank clips its shard by the norm that it returned, and these are not one norm"
    assert not diagnosis.of_clipped_update(clipping, 0, got, first, 0.0, [first])
    whole = oracle.update(clipping.case, own.before, {name: value * by[1] for name, value in own.released.items()})
    assert not diagnosis.of_clipped_update(clipping, 0, whole, first, 0.0, others)


def test_parameters_that_stood_still_are_named() -> None:
    step = PLAIN.steps[0]
    noise = torch.Generator().manual_seed(0)
    still = dict(step.after)
    still["units.0.linear0.weight"] = step.before["units.0.linear0.weight"].clone()
    said = named(diagnosis.of_update(PLAIN, 0, still))
    assert said.startswith("units.0.linear0.weight did not move at all")
    assert "nor did any other" not in said
    said = named(diagnosis.of_update(PLAIN, 0, {name: value.clone() for name, value in step.before.items()}))
    assert "did not move at all, nor did any other (does the optimizer have them?)" in said
    other = {name: v + torch.randn(v.shape, generator=noise, dtype=v.dtype) for name, v in step.after.items()}
    assert named(diagnosis.of_update(PLAIN, 0, other)) == ""


def test_of_parameters_that_did_not_move_at_all_no_gradient_is_explained() -> None:
    """Of a single sample: that it is left out, or its rank, would leave the parameters as they were too."""
    answer = later(replace(SMALL, layout=BatchLayout("contiguous", 1)))
    shown = {**answer.steps[0].before}
    assert [cause.key for cause in diagnosis.of_update(answer, 0, shown) or ()] == [DID_NOT_MOVE]


def test_a_frozen_parameter_that_is_trained_is_named_before_what_follows_from_it() -> None:
    layers = (replace(SMALL.model.layers[0], frozen="weight"), *SMALL.model.layers[1:])
    answer = oracle.answer(replace(SMALL, model=replace(SMALL.model, layers=layers)))
    step = answer.steps[0]
    (frozen,) = step.before.keys() - step.gradients.keys()
    words = f"{frozen}: frozen (requires_grad=False), and trained all the same"
    noise = {name: value + 1 for name, value in step.after.items() if name == frozen or name.endswith(".bias")}
    assert named(diagnosis.of_update(answer, 0, {**step.after, **noise})) == words
    assert named(diagnosis.of_gradient(answer, 0, {**step.used, frozen: torch.ones_like(step.before[frozen])})) == words
    assert named(diagnosis.of_gradient(answer, 0, {**step.used, frozen: torch.zeros_like(step.before[frozen])})) == ""


def test_silence_about_the_right_answer_the_unknown_and_the_ambiguous() -> None:
    step = PLAIN.steps[0]
    assert named(diagnosis.of_update(PLAIN, 0, step.after)) == ""
    assert named(diagnosis.of_gradient(PLAIN, 0, step.used)) == ""
    weights = right_weights(PLAIN)
    odd = torch.linspace(0.5, 1.5, 7)
    assert _said(PLAIN, weighted(PLAIN, weights * odd)) == ["", ""]
    nan = {name: torch.full_like(value, math.nan) for name, value in step.used.items()}
    assert _said(PLAIN, nan) == ["", ""]
    same = replace(SMALL, mesh=MeshSpec(2), layout=BatchLayout("contiguous", 4))
    crowded = oracle.answer(replace(same, step=replace(same.step, normaliser=2)))  # W = K = N = B/N = 2
    assert _said(crowded, weighted(crowded, right_weights(crowded) * 2)) == ["", ""]


def test_what_overflows_fits_nothing() -> None:
    got = torch.tensor([3.0, 1e5], dtype=torch.float64)
    assert not fits(SMALL, got, torch.tensor([math.inf, math.inf], dtype=torch.float64))
    assert not fits(SMALL, got, torch.tensor([3.0, math.inf], dtype=torch.float64))
    assert fits(SMALL, torch.tensor([math.inf]), torch.tensor([math.inf]))
    assert fits(SMALL, got, got * (1 + 2.0**-52))


def test_what_a_case_cannot_tell_from_nothing_or_from_everything_is_not_named() -> None:
    norm = float(PLAIN.steps[0].grad_norm)
    assert diagnosis.of_grad_norm(PLAIN, 0, 0, norm * (1 + 2.0**-52)) is None
    narrow = oracle.answer(replace(SMALL, model=ModelSpec((LayerSpec(1),), features=1), mesh=MeshSpec(2)))
    step = narrow.steps[0]
    name = "tail.linear0.weight"  # one element, so the shard of rank 0 is all there is beside the instrument's
    still = {**step.after, name: step.before[name]}
    assert bool((still[name] != step.after[name]).any())
    assert not any("shard of" in cause.text for cause in diagnosis.of_update(narrow, 0, still) or ())
    alone = oracle.answer(replace(PROBE.case, mesh=MeshSpec(1)), EPS)
    squares = alone.steps[0].squared_norms
    rows = local_rows(alone.case, 0, 0, alone.steps[0].samples)
    said = diagnosis.of_norms(alone, 0, 0, (squares * 0.5).sqrt()[rows]) or ()
    assert not any("own shard" in cause.text for cause in said)


@pytest.mark.parametrize(("off", "strength"), [([0.5, 0.0, 0.0, 0.0], WEAK), ([0.5, 0.0, 0.5, 0.0], EXACT)])
def test_one_wrong_sample_is_no_pattern_of_first_ones(off: list[float], strength: int) -> None:
    """The first of the one micro-batch of two that holds a wrong sample; and of both."""
    places = [[0, 1], [2, 3]]
    case = TrainingCase(ModelSpec((LayerSpec(1),)))
    found = [*cause_fit.singled_out(case, off, [1] * 4, places if strength == EXACT else places[:1], "norm")]
    assert [(cause.key, cause.strength) for cause in found] == [("first of each micro-batch", strength)]
