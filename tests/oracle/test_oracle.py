"""The oracle against torch.func, against training by hand, and the promises of its instrument."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, Schedule, TrainingCase
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.tokens import decode
from fsdpcheck.workload import batches, models
from fsdpcheck.workload.optimizer import make_optimizer, project_
from tests.common.fabricated import SMALL, clipped
from tests.common.tables import each

LAYERS = SMALL.model.layers
MODELS = {
    "vector": SMALL.model,
    "sequence": replace(SMALL.model, input="sequence", length=3),
    "tokens": ModelSpec(LAYERS, input="tokens", features=4, length=3, vocabulary=6, padding_idx=2),
    "layer norm": ModelSpec(LAYERS, input="sequence", features=4, length=2, layer_norm=True),
    "tied": ModelSpec((LayerSpec(4, activation="abs"), LayerSpec(4, True, "leaky_relu")), features=4, tied=(0, 1)),
    "tied tokens": ModelSpec((LayerSpec(6),), input="tokens", features=4, length=3, vocabulary=6, tied=(-1, 0)),
    "frozen": ModelSpec((replace(LAYERS[0], frozen="weight"), replace(LAYERS[1], frozen="bias")), features=4),
}


@each("name", MODELS)
@each("loss", ["mse", "linear", "hinge", "l1"])
def test_per_sample_gradients_are_those_of_torch_func(name: str, loss: str) -> None:
    case = clipped("exact", replace(SMALL, model=MODELS[name]), loss=loss)
    step = oracle.answer(case).steps[0]
    model, per_sample = models.build(case).double(), models.loss_for(case)
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss_of(parameters: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        packed = torch.func.functional_call(model, parameters, (x.unsqueeze(0),))
        return per_sample(packed, t.unsqueeze(0))[0]

    samples = list(step.samples)
    packed = torch.cat([batches.targets(case)[samples], step.targets], 1)
    wanted = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(parameters, batches.inputs(case)[samples], packed)
    assert step.gradients.keys() == wanted.keys()
    assert all(torch.equal(step.gradients[n], value) for n, value in wanted.items())


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec(momentum=0.5, weight_decay=0.25),
        OptimizerSpec("adamw", 3),
        OptimizerSpec("adam", 1, weight_decay=0.5, schedule="halving"),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_plain_steps_are_ordinary_full_batch_training(optimizer: OptimizerSpec, dtype: str) -> None:
    step = replace(SMALL.step, steps=3, optimizer=optimizer)
    case = replace(SMALL, step=step, arithmetic=replace(SMALL.arithmetic, dtype=dtype))
    answer = oracle.answer(case)
    model = models.build(case)
    trainer = make_optimizer(optimizer, model.parameters())
    for k, wanted in enumerate(answer.steps):
        samples = list(wanted.samples)
        packed = torch.cat([batches.targets(case)[samples], wanted.targets.to(wanted.norms.dtype)], 1)
        losses = models.loss_for(case)(model(batches.inputs(case)[samples]), packed)
        trainer.zero_grad()
        (losses.sum() / case.step.normaliser).backward()
        trainer.step()
        assert all(torch.equal(p, wanted.after[n]) for n, p in model.named_parameters()), f"step {k}"
        project_(model.parameters(), case)


def test_what_is_thawed_behind_the_first_step_is_trained_with_a_state_that_begins_there() -> None:
    """By an optimizer that has it from the beginning, as gradual unfreezing is written; weight decay waits as well."""
    optimizer = OptimizerSpec("adamw", 3, weight_decay=0.25)
    case = replace(SMALL, model=MODELS["frozen"], step=replace(SMALL.step, steps=3, optimizer=optimizer, thaws=True))
    answer, model = oracle.answer(case), models.build(case)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    trainer = make_optimizer(optimizer, model.parameters())
    for k, wanted in enumerate(answer.steps):
        samples = list(wanted.samples)
        if k == 1:
            model.requires_grad_()
        packed = torch.cat([batches.targets(case)[samples], wanted.targets.to(wanted.norms.dtype)], 1)
        losses = models.loss_for(case)(model(batches.inputs(case)[samples]), packed)
        trainer.zero_grad()
        (losses.sum() / case.step.normaliser).backward()
        trainer.step()
        assert all(torch.equal(p, wanted.after[n]) for n, p in model.named_parameters()), f"step {k}"
        moved = {name for name in frozen if not torch.equal(wanted.before[name], wanted.after[name])}
        assert (bool(moved), frozen <= wanted.gradients.keys()) == (k > 0, k > 0)
        project_(model.parameters(), case)


def test_what_is_frozen_again_behind_the_second_step_stands_still() -> None:
    """As on a device that lets gradients go: neither moments nor weight decay move it, and what is trained goes on."""
    optimizer = OptimizerSpec("adamw", 3, weight_decay=0.25)
    step = replace(SMALL.step, steps=4, optimizer=optimizer, thaws=True, refreezes=True)
    case = replace(SMALL, model=MODELS["frozen"], step=step)
    answer, thawed = oracle.answer(case), oracle.answer(replace(case, step=replace(step, refreezes=False)))
    frozen = models.frozen(case)
    assert frozen
    for k, wanted in enumerate(answer.steps):
        moved = {name for name, value in wanted.before.items() if not torch.equal(value, wanted.after[name])}
        assert (bool(moved & frozen), frozen <= wanted.gradients.keys()) == (k == 1, k == 1)
        assert moved - frozen
    assert all(torch.equal(answer.steps[1].after[name], value) for name, value in thawed.steps[1].after.items())


@pytest.mark.parametrize("schedule", ["constant", "halving"])
def test_one_update_is_that_of_its_step(schedule: Schedule) -> None:
    """SGD has no state, so every step of a training is one update by itself, with the step's learning rate."""
    case = replace(SMALL, step=replace(SMALL.step, steps=3, optimizer=OptimizerSpec(schedule=schedule)))
    for k, step in enumerate(oracle.answer(case).steps):
        updated = oracle.update(case, step.before, step.used, k)
        assert all(torch.equal(updated[name], value) for name, value in step.after.items()), f"step {k}"
    later, at_once = oracle.update(case, step.before, step.used, 2), oracle.update(case, step.before, step.used)
    moved = {name: bool((later[name] != at_once[name]).any()) for name in later}
    assert any(moved.values()) == (schedule == "halving")


def test_numbers_that_leave_the_range_of_float64_are_not_exact() -> None:
    """Three attentions of weights that nobody projects; their squares were more than a float can be."""
    token = (
        "v2:AAAAt-nTaS14-fgd9xLF1oEKRTAUxvEXOmnOFnkeUStJStLNu1-X45gxiV1eQB_6_7aPkevaWS_x4lG89FZcLzrrRaNeAQIQxFHEbPuVgJUzYH"
        "7ItuB4KZg5fLVg86hxRNz8zu5hb6tHxqnpuAdrHB16zw1zLtl8pon_Z8YY1CmLOrHvHEJoURcxdRJVmHjkbr53nAFPrsFTt8CTfwFv-rHkHXr0rt"
        "B5lnZpkQW6HOKum4quiMvouff-C9nxtnw"
    )
    case = decode(token).case
    assert isinstance(case, TrainingCase)
    with pytest.raises(NotExact, match="step 1, gradients: their norm is beyond float64"):
        oracle.answer(case)


def test_every_step_but_the_first_starts_from_projected_integers() -> None:
    case = replace(SMALL, step=replace(SMALL.step, optimizer=OptimizerSpec("adamw", 2)))
    first, second = oracle.answer(case).steps
    assert any(bool((value != value.round()).any()) for value in first.after.values())
    for name, value in second.before.items():
        assert torch.equal(value, first.after[name].round().clamp(-2, 2))


def test_exact_cases_clip_at_least_one_sample_and_reach_every_boundary() -> None:
    reached = set()
    for seed in range(40):
        case = replace(clipped("exact", clip_norm=1 << 10), seed=seed)
        answer = oracle.answer(case)
        for step in answer.steps:
            assert bool((step.factors < 1).any())
            for squared, factor in zip(step.squared_norms.tolist(), step.factors.tolist(), strict=True):
                t = squared / models.loss_scale(case) ** 2
                kind = {2.0**20: "at", 2.0**20 - 1: "below"}.get(t, "clipped" if factor < 1 else "free")
                assert kind != "clipped" or math.log2(t) % 2 == 0
                assert factor == min(1.0, 2.0**10 / math.sqrt(t)) or kind == "below"
                reached.add(kind)
    assert reached == {"at", "below", "clipped", "free"}


def test_the_instrument_of_a_probe_case_reads_each_factor() -> None:
    case = clipped("probe")
    answer = oracle.answer(case, FactorRule(eps=1e-6))
    for k, step in enumerate(answer.steps):
        rows = step.used[oracle.INSTRUMENT].flatten()[[sample - 7 * k for sample in step.samples]]
        torch.testing.assert_close(rows * 8 / 3, step.factors, rtol=2**-50, atol=0)
        assert torch.equal(answer.instrument[k, 7 * k : 7 * k + 7, :7], torch.eye(7, dtype=torch.float64))


def test_the_clip_norm_of_an_unclipped_case_is_a_power_of_two_above_twice_every_norm() -> None:
    answer = oracle.answer(clipped("unclipped"))
    largest = max(float(step.norms.max()) for step in answer.steps)
    assert 2 * largest <= answer.clip_norm <= 4 * largest
    assert math.log2(answer.clip_norm).is_integer()
    assert all(bool((step.factors == 1).all()) for step in answer.steps)


def test_factor_expressions_are_those_of_torch() -> None:
    norms = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 20
    divided = oracle.factors(norms, 3.0, FactorRule(1e-6))
    reciprocal = oracle.factors(norms, 3.0, FactorRule(1e-6, "reciprocal"))
    assert torch.equal(reciprocal, (3.0 / (norms + 1e-6)).clamp(max=1.0))
    assert torch.equal(divided, torch.tensor([min(1.0, 3.0 / (n + 1e-6)) for n in norms.tolist()], dtype=torch.float64))
    assert not torch.equal(divided, reciprocal)


def test_wrap_around_duplicates_count_with_multiplicity_and_dropped_samples_not_at_all() -> None:
    wrapping = replace(SMALL, layout=BatchLayout("sampler", 7))
    dropping = replace(SMALL, layout=BatchLayout("sampler", 7, drop_last=True))
    wraps, drops = oracle.answer(wrapping).steps[1], oracle.answer(dropping).steps[1]
    assert (wraps.samples, wraps.multiplicity) == ((7, 8, 9, 10, 11, 12, 13), (2, 2, 1, 1, 1, 1, 1))
    assert (drops.samples, drops.multiplicity) == ((7, 8, 9, 10, 11, 12), (1,) * 6)
    gradient = wraps.gradients[
        "tail.linear0.weight" if "tail.linear0.weight" in wraps.gradients else "units.0.linear0.weight"
    ]
    counts = torch.tensor(wraps.multiplicity, dtype=torch.float64)
    assert torch.equal(torch.tensordot(counts, gradient, 1) / 8, wraps.used["units.0.linear0.weight"])


def test_global_clipping_scales_the_released_gradient_as_torch_does() -> None:
    case = replace(SMALL, step=replace(SMALL.step, max_grad_norm=0.5))
    step = oracle.answer(case).steps[0]
    leaves = [torch.nn.Parameter(torch.zeros_like(value)) for value in step.released.values()]
    for leaf, value in zip(leaves, step.released.values(), strict=True):
        leaf.grad = value.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
    torch.testing.assert_close(step.grad_norm, norm, rtol=2**-50, atol=0)
    for leaf, value in zip(leaves, step.used.values(), strict=True):
        torch.testing.assert_close(value, leaf.grad, rtol=2**-50, atol=0)


def test_equal_cases_give_equal_answers_and_torch_random_streams_stay_as_they_were() -> None:
    state = torch.get_rng_state()
    one, two = oracle.answer(clipped("exact")), oracle.answer(clipped("exact"))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.instrument, two.instrument)
    assert all(torch.equal(a.after[n], b.after[n]) for a, b in zip(one.steps, two.steps, strict=True) for n in a.after)


def test_a_step_without_any_sample_is_a_step_with_a_zero_gradient() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(3), BatchLayout("sampler", 2, drop_last=True), SMALL.step)
    step = oracle.answer(case).steps[0]
    assert step.samples == ()
    assert not any(bool(value.any()) for value in step.used.values())
    assert all(torch.equal(step.before[name], value) for name, value in step.after.items())
