"""What did not come back from a checkpoint is named; so is what one run, one rank or one record has that none may."""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdpcheck import diagnosis, oracle
from fsdpcheck.case import BatchLayout, MeshSpec, OptimizerSpec, TrainingCase
from fsdpcheck.checks.noise import noisy
from fsdpcheck.diagnosis import checkpoint, stale_state
from fsdpcheck.diagnosis.collectives import of_neighbours
from fsdpcheck.execution import RankResult
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.cause import named
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload.optimizer import make_optimizer
from tests.common.fabricated import SMALL, clipped, execution
from tests.common.later import later


def _answer(optimizer: OptimizerSpec) -> Answer:
    return later(replace(SMALL, step=replace(SMALL.step, optimizer=optimizer)))


MOMENTUM = _answer(OptimizerSpec(momentum=0.5))
ADAMW = _answer(OptimizerSpec("adamw"))
HALVING = _answer(OptimizerSpec(schedule="halving"))


def _after(answer: Answer, *lost: str) -> Named:
    """Parameters after step 1 of an optimizer that has lost these entries of its state after step 0."""
    named_parameters = {name: torch.nn.Parameter(answer.steps[0].before[name].clone()) for name in answer.trainable}
    optimizer = make_optimizer(answer.case.step.optimizer, named_parameters.values())
    for step in answer.steps:
        for name, parameter in named_parameters.items():
            parameter.data, parameter.grad = step.before[name].clone(), step.used[name].clone()
        optimizer.step()
        for state in optimizer.state.values():
            for key in lost:
                state[key] = torch.zeros_like(state[key])
    return {name: parameter.detach() for name, parameter in named_parameters.items()}


def test_the_part_of_an_optimizers_state_that_was_lost_is_named() -> None:
    assert "the optimizer's state did not come back" in named(
        checkpoint.of_update(MOMENTUM, 1, _after(MOMENTUM, "momentum_buffer"))
    )
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert f"{key} did not come back" in named(checkpoint.of_update(ADAMW, 1, _after(ADAMW, key)))
    everything = named(checkpoint.of_update(ADAMW, 1, _after(ADAMW, "exp_avg", "exp_avg_sq", "step")))
    assert everything.startswith("the optimizer's state did not come back")
    step = HALVING.steps[1]
    faster = {name: step.before[name] - value for name, value in step.used.items()}
    assert "schedule did not come back" in named(checkpoint.of_update(HALVING, 1, faster))


def test_an_update_that_no_lost_state_explains_is_not_said_to_be_a_new_optimizers() -> None:
    step = MOMENTUM.steps[1]
    other = {name: step.after[name] + 1 for name in step.used}
    assert named(checkpoint.of_update(MOMENTUM, 1, other)).startswith("the optimizer's state, with its hyperparameters")


def test_noise_of_an_earlier_step_is_told_from_other_noise() -> None:
    answer = oracle.answer(noisy(clipped("exact", replace(SMALL, arithmetic=replace(SMALL.arithmetic, project=True)))))
    drawn = [_draws(answer, seed) for seed in range(3)]
    never = [
        ({name: value + drawn[k][name] for name, value in step.used.items()}, dict(step.after))
        for k, step in enumerate(answer.steps)
    ]
    again = {name: value + drawn[0][name] for name, value in answer.steps[1].used.items()}
    other = {name: value + drawn[2][name] for name, value in answer.steps[1].used.items()}
    assert "noise of the first step" in named(checkpoint.of_noise(answer, 1, never, again))
    assert "it is other noise" in named(checkpoint.of_noise(answer, 1, never, other))


def test_a_state_that_did_not_come_back_is_named_where_gradients_have_noise_too() -> None:
    drawn = [_draws(MOMENTUM, seed) for seed in range(2)]
    never, buffers = [], dict.fromkeys(MOMENTUM.trainable, torch.zeros(()))
    shown = dict(MOMENTUM.steps[0].before)
    for step, noise in zip(MOMENTUM.steps, drawn, strict=True):
        gradients = {name: value + noise[name] for name, value in step.used.items()}
        buffers = {name: 0.5 * buffers[name] + value for name, value in gradients.items()}
        shown = {name: shown[name] - value for name, value in buffers.items()}
        never.append((gradients, shown))
    answer = checkpoint.with_noise(MOMENTUM, never)
    new = {name: answer.steps[1].before[name] - value for name, value in never[1][0].items()}
    said = "the optimizer's state did not come back: the update is that of a new optimizer"
    assert said in named(checkpoint.of_update(answer, 1, new))
    assert said not in named(checkpoint.of_update(MOMENTUM, 1, new))  # without the noise no update is that one


def _draws(answer: Answer, seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    scale = float(answer.clip_norm)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) * scale
        for name, value in answer.steps[0].used.items()
    }


def test_a_load_that_reads_one_writer_is_told_from_other_values() -> None:
    alone = oracle.answer(replace(SMALL, mesh=MeshSpec(1)))
    wanted = {name: value.clone() for name, value in MOMENTUM.steps[0].after.items() if name != "instrument.weight"}
    part = {name: torch.cat([value[: -(-len(value) // 3)], value[-(-len(value) // 3) :] + 1])
            for name, value in wanted.items()}  # fmt: skip
    assert "only the part that one rank wrote is read" in named(checkpoint.of_loaded(alone, MOMENTUM, part, wanted))
    other = {name: value + 1 for name, value in wanted.items()}
    assert named(checkpoint.of_loaded(alone, MOMENTUM, other, wanted)) == ""
    whole = oracle.answer(replace(SMALL, mesh=MeshSpec(2)))  # rows 0 and 1 of three, of which rank 0 of three wrote one
    same = {name: torch.arange(len(value)).view(-1, *[1] * (value.dim() - 1)) for name, value in wanted.items()}
    second = {name: value + (row == 0) * (len(value) == 3) for (name, value), row in
              zip(wanted.items(), same.values(), strict=True)}  # fmt: skip
    last = {name: value + (row == 2) * (len(value) == 3) for (name, value), row in
            zip(wanted.items(), same.values(), strict=True)}  # fmt: skip
    assert "only the part that one rank wrote is read" in named(checkpoint.of_loaded(whole, MOMENTUM, second, wanted))
    assert named(checkpoint.of_loaded(whole, MOMENTUM, last, wanted)) == ""


def test_replicas_that_start_apart_are_named() -> None:
    answer = oracle.answer(replace(SMALL, mesh=MeshSpec(2, 2), layout=BatchLayout("strided", 8)))
    right = answer.steps[0].before
    apart = {name: value + 1 for name, value in right.items()}
    said = named(diagnosis.of_initial(answer, apart, [right, right, apart, apart]))
    assert said.startswith("replicas other than the first start from other parameters")
    assert named(diagnosis.of_initial(answer, apart, [right, apart, right, apart])) == ""


def test_gradients_of_old_parameters_are_one_mistake_whichever_units_are_old() -> None:
    answer = oracle.answer(replace(SMALL, step=replace(SMALL.step, loss="mse")))
    now, old = (answer.steps[k].before for k in (1, 0))
    inner = [name for name in now if name.startswith("units.")]
    assert 0 < len(inner) < len(now)
    keys = set()
    for names in (list(now), inner):
        mixed = stale_state.at(answer, 1, {name: (old if name in names else now)[name] for name in now})
        told = diagnosis.of_gradient(answer, 1, mixed) or ()
        assert named(told).startswith("the gradient is that of the first step's parameters")
        keys.add(next(cause.key for cause in told if cause.key.startswith("stale")))
        off = {name: value * 1.25 for name, value in mixed.items()}
        assert "parameters" not in named(diagnosis.of_gradient(answer, 1, off))
    assert len(keys) == 1


def test_a_second_run_that_finds_an_earlier_ones_state_is_told_from_rounding() -> None:
    first = execution(MOMENTUM)
    scaled, rounded = execution(MOMENTUM), execution(MOMENTUM)
    for own, other in ((scaled, 1.25), (rounded, 1 + 2.0**-52)):
        grads = own.ranks[0].steps[0].grads
        assert grads is not None
        own.ranks[0].steps[0].grads = {name: value * other for name, value in grads.items()}
    assert "state of an earlier training outlives it" in named(stale_state.repeated(first, scaled))
    assert named(stale_state.repeated(first, rounded)) == ""


def _gather(size: int) -> RankResult:
    call = Collective(
        "all_gather", (0, 1), "world", 0, inputs=(("float64", (size,)),), outputs=(("float64", (2 * size,)),)
    )
    return RankResult(0, {}, trace=(call,))


def _lists(*lists: tuple[int, ...]) -> TrainingCase:
    plain = replace(SMALL, mesh=MeshSpec(2), step=replace(SMALL.step, steps=1, micro_batches=1))
    return replace(plain, layout=BatchLayout("listed", 7, lists=lists))


def test_a_message_whose_size_tells_of_a_record_is_named() -> None:
    first, second = _lists((0, 1, 2), (3,)), _lists((0, 1), (3,))
    told = {cause.text for cause in of_neighbours(first, second, _gather(3), _gather(2), 0)}
    assert any("the size of what all_gather sends is that of the largest local batch" in text for text in told)
    assert not of_neighbours(first, second, _gather(7), _gather(5), 0)
    assert not of_neighbours(first, second, RankResult(0, {}), _gather(3), 0)  # no size, so nothing is said


def test_a_message_that_is_not_sent_where_there_is_nothing_to_send_is_named() -> None:
    one, none = _lists((0,), ()), _lists((), ())
    after = Collective("barrier", (0, 1), "world", 1)
    sent = replace(_gather(1), trace=(*_gather(1).trace, after))
    told = [cause.text for cause in of_neighbours(one, none, sent, RankResult(0, {}, trace=(after,)), 0)]
    words = "that of the largest local batch, and of nothing there is no call: make it a public number"
    assert f"the size of what all_gather sends is {words}" in told
    assert not of_neighbours(_lists((0, 1), ()), _lists((0,), ()), sent, RankResult(0, {}, trace=(after,)), 0)
    other = Collective("broadcast", (0, 1), "world", 1)
    assert not of_neighbours(one, none, sent, RankResult(0, {}, trace=(other,)), 0)
