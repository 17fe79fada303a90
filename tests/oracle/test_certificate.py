"""The bit budget against brute force, four squares, grids: what is accepted is exact, what is not is rejected."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters.contract import ArithmeticRule, FactorRule, Features, Promise
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.errors import NotExact, NotOnRanks
from fsdpcheck.exact.certifier import FLOAT64
from fsdpcheck.exact.four_squares import four_squares, slack_targets
from fsdpcheck.exact.grid import EMPTY, bits, exact_square_sum, grid_exponent, premultiplies_exactly
from fsdpcheck.oracle import Answer, batched_step, certificate
from fsdpcheck.strategies.enumeration import distinct
from fsdpcheck.workload import batches, clip_groups, layers, models, numerics
from tests.common.fabricated import SMALL, clipped
from tests.common.tables import each

THAWED = replace(
    SMALL,
    model=replace(SMALL.model, layers=(replace(SMALL.model.layers[0], frozen="all"), SMALL.model.layers[1])),
    step=replace(SMALL.step, thaws=True),
)
EVERYTHING = Features(frozenset(get_args(Promise)), accepts=frozenset(get_args(Trait)))
FEW = 20


def _squares(n: int) -> int:
    return sum(value * value for value in four_squares(n))


def test_four_squares_add_up_for_every_small_number() -> None:
    assert [_squares(n) for n in range(3000)] == list(range(3000))


@pytest.mark.parametrize("n", [2**52, 2**52 - 1, 4**20 * 7, 4**25 * 15, 7 * 4**24 + 4**24, 2**53 - 111])
def test_four_squares_add_up_for_large_and_awkward_numbers(n: int) -> None:
    assert _squares(n) == n


def test_four_squares_add_up_for_random_numbers_of_every_length() -> None:
    draw = random.Random(0)
    numbers = [draw.getrandbits(length) for length in range(1, 53) for _ in range(10)]
    assert [_squares(n) for n in numbers] == numbers


def test_four_squares_refuse_a_negative_number() -> None:
    with pytest.raises(ValueError, match="n >= 0"):
        four_squares(-1)


def test_slack_targets_reach_every_choice_and_clip_at_least_one_sample() -> None:
    assert slack_targets([3, 3, 3, 3], 16, 1, [0, 1, 2, 3]) == [64, 16, 15, None]
    assert slack_targets([3, 3], 16, 1, [3, 3]) == [None, 64]
    assert slack_targets([100, 16], 16, 1, [3, 2]) == [256, None]
    assert slack_targets([3, 3], 16 * 4, 4, [0, 2]) == [256, 60]
    assert slack_targets([], 16, 1, []) == []


@each("values", [[1.0, 6.0], [0.75, 2.0], [8.0, 24.0], [0.1], [2.0**-1074, 1.0], [-3.0 * 2**60]])
def test_grid_exponent_is_the_largest_that_holds_every_entry(values: list[float]) -> None:
    exponent = grid_exponent(torch.tensor(values, dtype=torch.float64))
    assert all((Fraction(v) / Fraction(2) ** exponent).denominator == 1 for v in values)
    assert any((Fraction(v) / Fraction(2) ** (exponent + 1)).denominator == 2 for v in values)


def test_zeros_lie_on_every_grid_and_infinity_on_none() -> None:
    assert grid_exponent(torch.zeros(3)) == EMPTY
    assert bits(0.0, EMPTY) == 0
    with pytest.raises(NotExact, match="inf"):
        grid_exponent(torch.tensor([1.0, float("inf")]))


def test_exact_square_sum_keeps_what_float64_loses() -> None:
    assert exact_square_sum([torch.tensor([1e20, 1.0], dtype=torch.float64)]) == 10**40 + 1


def _reduced_in_another_order(answer: Answer, k: int, draw: random.Random) -> dict[str, Tensor]:
    """The released gradient as ranks would form it: case dtype, samples in any order, summed group by group, / W."""
    case, step = answer.case, answer.steps[k]
    model = models.build(case)
    model.load_state_dict(step.before, strict=False)
    if case.thawed_in(k):
        model.requires_grad_()
    every = [row for row, count in enumerate(step.multiplicity) for _ in range(count)]
    draw.shuffle(every)
    cut = draw.randint(0, len(every))
    total = {name: torch.zeros_like(value) for name, value in step.released.items()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for rows in (every[:cut], every[cut:]):
        samples = [step.samples[row] for row in rows]
        packed = torch.cat([batches.targets(case)[samples], step.targets[rows].to(step.norms.dtype)], 1)
        losses = models.loss_for(case)(model(batches.inputs(case)[samples]), packed)
        for group in range(len(answer.clip_norms)):
            weights = clip_groups.column(step.factors, group)[rows] * (case.world_size / case.step.normaliser)
            own = clip_groups.members(case, trained, group)
            if own:
                torch.autograd.backward(losses, weights, retain_graph=True, inputs=list(own.values()))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in total:
            total[name] = parameter.grad / case.world_size
    return total


@pytest.mark.parametrize("family", ["PLAIN", "PRIVATE_UNCLIPPED", "PRIVATE_EXACT"])
def test_accepted_cases_give_the_same_bits_in_any_order_of_summation(family: str) -> None:
    accepted = 0
    for case in distinct(strategies.cases_of(getattr(strategies, family), EVERYTHING), FEW):
        try:
            answer = oracle.answer(case, FactorRule(eps=1e-6))
            certificate.prove(case, answer)
        except NotExact:
            continue
        accepted += 1
        draw = random.Random(case.seed)
        for k, step in enumerate(answer.steps):
            with numerics.of(case):
                got = _reduced_in_another_order(answer, k, draw)
            assert all(torch.equal(got[name], value) for name, value in step.released.items())
    assert accepted >= 0.9 * FEW


def _norms_by_hooks(answer: Answer, gram: bool) -> Tensor:
    """Per-sample norms of step 0 in the case's dtype from activations and backprops of Linear layers."""
    case, step = answer.case, answer.steps[0]
    model, samples = models.build(case), list(step.samples)
    seen: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: seen.append((module, inputs[0].detach(), g)))  # type: ignore[arg-type]

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(hook)  # type: ignore[arg-type]
    packed = torch.cat([batches.targets(case)[samples], step.targets.to(step.norms.dtype)], 1)
    models.loss_for(case)(model(batches.inputs(case)[samples]), packed).sum().backward()
    total = torch.zeros_like(step.norms)
    uses: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for module, a, g in seen:
        a, g = (t.unsqueeze(1) if t.dim() == 2 else t for t in (a, g))
        if module.weight.requires_grad:
            uses.setdefault(id(module.weight), []).append((a, g))
        if module.bias is not None and module.bias.requires_grad:
            total += g.sum(1).square().sum(1)
    for pairs in uses.values():  # a weight used twice is a longer sequence: cross terms included
        a, g = torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 1)
        direct = (g.mT @ a).square().sum((1, 2))
        total += ((a @ a.mT) * (g @ g.mT)).sum((1, 2)) if gram else direct
    return total.sqrt()


@pytest.mark.parametrize("family", ["PRIVATE_EXACT", "PRIVATE_PROBE"])
def test_accepted_norms_are_the_same_bits_in_gram_and_direct_form(family: str) -> None:
    others: set[Trait] = {"tokens", "layer-norm", "padding_idx", "conv-private", "group-norm-private"}
    others |= {"rms-norm-private", "bags-private", "several-heads-private"}
    linear_only = replace(EVERYTHING, accepts=EVERYTHING.accepts - others)

    accepted = 0
    for case in distinct(strategies.cases_of(getattr(strategies, family), linear_only), FEW):
        try:
            answer = oracle.answer(case)
            certificate.prove(case, answer)
        except NotExact:
            continue
        accepted += 1
        for gram in (True, False):
            with numerics.of(case):
                assert torch.equal(_norms_by_hooks(answer, gram), answer.steps[0].norms), f"gram={gram}"
    assert accepted >= 0.9 * FEW


def _nudged(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    right = models.initial_parameters
    monkeypatch.setattr(models, "initial_parameters", lambda case: {n: change(v) for n, v in right(case).items()})


@pytest.mark.parametrize("clipping", ["none", "unclipped", "probe"])
def test_values_that_are_not_dyadic_are_rejected(monkeypatch: pytest.MonkeyPatch, clipping: str) -> None:
    _nudged(monkeypatch, lambda value: value + 0.1)
    case = clipped(clipping)
    with pytest.raises(NotExact, match=r"step 0, .*: needs \d+ bits; had 53"):
        certificate.prove(case, oracle.answer(case))


def test_slack_for_values_that_are_not_dyadic_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    _nudged(monkeypatch, lambda value: value + 0.1)
    with pytest.raises(NotExact, match="slack"):
        oracle.answer(clipped("exact"))


def test_what_fits_float64_can_exceed_float32_and_the_stage_is_named() -> None:
    wide = Arithmetic("float64", weights=200, inputs=100)
    case = replace(SMALL, arithmetic=wide)
    certificate.prove(case, oracle.answer(case))
    case = replace(SMALL, arithmetic=replace(wide, dtype="float32"))
    with pytest.raises(NotExact, match=r"needs \d+ bits; had 24"):
        certificate.prove(case, oracle.answer(case))


def test_factors_that_eps_makes_irrational_are_rejected() -> None:
    case = clipped("exact")
    certificate.prove(case, oracle.answer(case, FactorRule(eps=1e-6)))
    with pytest.raises(NotExact, match="weighted"):
        certificate.prove(case, oracle.answer(case, FactorRule(eps=1.0)))


@pytest.mark.parametrize("clipping", ["none", "exact"])
def test_a_sum_over_the_batch_that_alone_needs_the_last_bit_is_rejected(
    monkeypatch: pytest.MonkeyPatch, clipping: str
) -> None:
    case = clipped(clipping)
    answer = oracle.answer(case, FactorRule(eps=1e-6))
    case = replace(case, step=replace(case.step, clipping="none"))
    answer = replace(answer, case=case)
    most = max(certificate.prove(case, answer).items(), key=lambda item: item[1])
    assert most[0].startswith("weighted")
    monkeypatch.setitem(certificate.PRECISIONS, "float64", replace(FLOAT64, accumulator=most[1] - 1))
    with pytest.raises(NotExact, match=rf"weighted .*: needs {most[1]} bits; had {most[1] - 1}"):
        certificate.prove(case, answer)


def test_nested_rules_are_spared_the_weighted_sums_and_only_them() -> None:
    case = clipped("exact")
    used = certificate.prove(case, oracle.answer(case, FactorRule(eps=1.0, nested=True)))
    assert "squared norms" in used
    assert not [stage for stage in used if stage.startswith("weighted")]


def test_a_replicated_batch_with_a_normaliser_that_one_rank_cannot_divide_by_is_rejected() -> None:
    layout = replace(SMALL.layout, kind="replicated")
    case = replace(SMALL, layout=layout, step=replace(SMALL.step, normaliser=6))
    with pytest.raises(NotExact, match="normaliser"):
        certificate.prove(case, oracle.answer(case))


def test_a_layer_norm_off_the_grid_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(SMALL.model.layers, features=4, layer_norm=True)
    case = replace(SMALL, model=model)
    certificate.prove(case, oracle.answer(case))
    right = batches.inputs
    monkeypatch.setattr(batches, "inputs", lambda case: right(case) + torch.tensor([0.0, 0.0, 0.0, 1.0]))
    with pytest.raises(NotExact, match="leaves the grid"):
        certificate.prove(case, oracle.answer(case))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Softshrink(), "has no rule; next: the tier of real numbers"),
        (nn.Tanh(), "leaves every grid"),
        (nn.Softplus(), "leaves every grid"),
    ],
)
def test_a_function_that_no_grid_holds_is_rejected(monkeypatch: pytest.MonkeyPatch, layer: nn.Module, why: str) -> None:
    monkeypatch.setattr(layers, "activation", lambda kind: layer)
    with pytest.raises(NotExact, match=rf"cannot express aten\.{type(layer).__name__.lower()}\.default: it {why}"):
        certificate.prove(SMALL, oracle.answer(SMALL))


def test_absolute_gradients_bound_the_gradients() -> None:
    answer = oracle.answer(SMALL)
    scale = models.loss_scale(SMALL)
    for step in answer.steps:
        bound = certificate.absolute_gradients(SMALL, step)
        assert bound.keys() == step.gradients.keys()
        assert all(bool((g.abs() <= bound[name] * scale).all()) for name, g in step.gradients.items())
        assert any(bool((g.abs() < bound[name] * scale).any()) for name, g in step.gradients.items())


@each("size", range(1, 65))
def test_premultiplied_multiples_are_exact_where_it_is_said(size: int) -> None:
    """Over all of float32, and in float64 for the sizes that ranks have."""
    for dtype, precision in ((torch.float32, 24), (torch.float64, 53)):
        quotients = torch.arange(1, (1 << 24) // size, dtype=dtype)  # their multiples are integers below 2**24
        same = torch.equal(quotients.mul(size).mul_(torch.ones((), dtype=dtype) / size), quotients)
        assert same == premultiplies_exactly(size, precision)


def test_averages_that_would_round_again_are_not_exact() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(7), BatchLayout("contiguous", 7))
    for dtype, averaging in (("float64", "premultiply"), ("float32", "divide")):
        proved = replace(case, arithmetic=Arithmetic(dtype, averaging=averaging))
        certificate.prove(proved, oracle.answer(proved))
    rounds = replace(case, arithmetic=Arithmetic("float32", averaging="premultiply"))
    with pytest.raises(NotExact, match="averaging: multiples of 7 times the rounded 1/7 round again"):
        certificate.prove(rounds, oracle.answer(rounds))


def test_sums_that_are_not_averaged_need_a_share_of_the_batch_that_losses_make_exact() -> None:
    """1/49 rounds so that 49 of it are not 1, which is the first such number in float64."""
    for ranks in (7, 41, 49):
        layout, step = BatchLayout("contiguous", ranks), StepSpec(normaliser=ranks)
        case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(ranks), layout, step)
        assert 7 * batches.share(case, averages=False) == pytest.approx(7 / ranks)
        answer = oracle.answer(case, conventions=ArithmeticRule("none"))
        if ranks < 49:
            certificate.prove(case, answer)
        else:
            with pytest.raises(NotOnRanks, match=r"49.0 times the rounded 1/N is not exact"):
                certificate.prove(case, answer)


def test_gradients_of_what_is_thawed_are_proved_from_the_step_on_in_which_it_is_trained() -> None:
    answer, model = oracle.answer(THAWED), models.build(THAWED).double()
    trained = []
    for step in answer.steps:
        batched_step.load(model, step)
        trained.append({*batched_step.trained(model)})
    first = {name for name, _ in model.named_parameters() if ".linear0." in name}
    assert (trained[0] & first, trained[1] - trained[0]) == (set(), first)
    certificate.prove(THAWED, answer)
