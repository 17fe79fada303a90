"""Checks of hooks, memory, copies and interruptions, on made-up notes: each thing that can be wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks import hooks_and_memory as watched_checks
from fsdpcheck.checks.noise import noisy
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Notes
from fsdpcheck.program.probes import hooks
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import models

CASE = TrainingCase(ModelSpec((LayerSpec(1),)))


def noted(name: str, *values: tuple[int, Any]) -> Execution:
    """One rank in which (step, value) were noted; as many steps as there are numbers from 0."""
    steps = max(step for step, _ in values) + 1
    case = TrainingCase(CASE.model, step=CASE.step.__class__(steps=steps))
    observations = [(name, "noted", step, value) for step, value in values]
    return Execution("made up", RunRequest(case, "x"), [RankResult(0, {}, [StepRecord({})] * steps, observations)])


def held(*steps: tuple[int, int]) -> Execution:
    """10 bytes before the first step; in each step (most, left)."""
    values = [(-1, ("at rest", 10))]
    for step, (most, left) in enumerate(steps):
        values += [(step, ("in a step", most)), (step, ("in a step", 12)), (step, ("at rest", left))]
    return noted(probes.memory.name, *values)


def test_equal_steps_that_leave_nothing_are_steady() -> None:
    watched_checks.assert_steady_memory(held((30, 10), (30, 10)))


@pytest.mark.parametrize(
    ("steps", "message"),
    [(((30, 12),), "held between steps"), (((30, 10), (40, 10)), "changes from step to step")],
    ids=["left behind", "growing"],
)
def test_memory_that_is_not_steady_is_found(steps: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(Violation, match=message):
        watched_checks.assert_steady_memory(held(*steps))


def test_what_a_step_leaves_allocated_on_a_gpu_is_found() -> None:
    """More after the first step than before it is right: gradients, and the state of the optimizer."""
    steady = [(-1, ("at rest", 10)), (0, ("allocated", 512)), (1, ("allocated", 512)), (2, ("allocated", 512))]
    watched_checks.assert_steady_memory(noted(probes.memory.name, *steady))
    with pytest.raises(Violation, match=r"a step leaves memory allocated\n.*got     1024 bytes on the GPU") as found:
        watched_checks.assert_steady_memory(noted(probes.memory.name, *steady[:-1], (2, ("allocated", 1024))))
    assert found.value.where == "after step 2, rank 0"


def test_the_allocator_is_asked_on_a_gpu_of_the_ranks_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 512)
    with FakeTensorMode():
        on_gpu = nn.ParameterList([torch.empty(1, device="cuda")])
    assert hooks._allocated(on_gpu) == 512
    assert hooks._allocated(nn.Linear(1, 1)) is None
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(hooks._allocated, on_gpu).result() is None


def test_a_step_in_which_a_rank_runs_no_layer_has_no_peak() -> None:
    values = [(-1, ("at rest", 10)), (0, ("at rest", 10)), (1, ("in a step", 30)), (1, ("at rest", 10))]
    watched_checks.assert_steady_memory(noted(probes.memory.name, *values))
    with pytest.raises(Violation, match="held between steps"):
        watched_checks.assert_steady_memory(noted(probes.memory.name, *values[:-1], (1, ("at rest", 12))))


def test_a_run_without_the_watcher_is_refused() -> None:
    with pytest.raises(UsageError, match="noted no memory"):
        watched_checks.assert_steady_memory(noted(probes.hook_calls.name, (0, ("forward", ""))))


def test_a_loss_that_is_not_left_as_it_was_is_found() -> None:
    watched_checks.assert_loss_kept(noted(probes.loss_kept.name, (0, []), (1, [])))
    with pytest.raises(Violation, match="got     another reduction, scale") as found:
        watched_checks.assert_loss_kept(noted(probes.loss_kept.name, (0, []), (1, ["reduction", "scale"])))
    assert found.value.where == "after step 1, rank 0"
    with pytest.raises(UsageError, match=r"rank 0 noted 1 of 2 steps; next: run it with probes\.loss_kept"):
        watched_checks.assert_loss_kept(noted(probes.loss_kept.name, (1, [])))


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda loss: setattr(loss, "reduction", "mean"), ["reduction"]),
        (lambda loss: setattr(loss, "forward", lambda *given: None), ["forward"]),
        (lambda loss: loss.register_forward_hook(lambda *given: None), ["_forward_hooks"]),
        (lambda loss: loss.eval(), ["training"]),
        (lambda loss: delattr(loss, "scale"), ["scale"]),
        (lambda loss: setattr(loss, "__class__", type("Other", (type(loss),), {})), ["__class__"]),
        (lambda loss: None, []),
    ],
)
def test_what_is_changed_of_a_loss_is_noted_by_name(change: Callable[[Any], object], changed: list[str]) -> None:
    told, seen, shown = list[Any](), list[Any](), list[Any]()
    probes.loss_kept(None, Notes(0, seen.append, lambda: 0, told.append, lambda made: None, on_loss=shown.append))
    loss = models.loss_for(CASE)
    (watch,) = shown
    watch(loss)
    (look,) = told
    change(loss)
    look("before_step")
    assert seen == []
    look("after_step")
    assert seen == [changed]


def test_hooks_on_as_many_parameters_as_have_no_gradient_need_not_fire() -> None:
    one_of_three = noted(probes.accumulations.name, (-1, 3), (0, 1))
    watched_checks.assert_parameter_hooks_fire(one_of_three, [2])
    with pytest.raises(Violation, match="parameter 0 of the optimizer fired 0 times"):
        watched_checks.assert_parameter_hooks_fire(one_of_three, [1])
    twice = noted(probes.accumulations.name, (-1, 2), (0, 1), (0, 1))
    with pytest.raises(Violation, match="parameter 1 of the optimizer fired 2 times"):
        watched_checks.assert_parameter_hooks_fire(twice, [1])


def test_hooks_on_parameters_that_do_not_fire_once_a_reduction_are_found() -> None:
    fired = (-1, 2), (0, 0), (0, 1)
    watched_checks.assert_parameter_hooks_fire(noted(probes.accumulations.name, *fired), [0])
    for wrong in (fired[:2], (*fired, (0, 1))):
        with pytest.raises(Violation, match=r"parameter 1 of the optimizer fired [02] times"):
            watched_checks.assert_parameter_hooks_fire(noted(probes.accumulations.name, *wrong), [0])
    with pytest.raises(Violation, match="no optimizer has a trained parameter"):
        watched_checks.assert_parameter_hooks_fire(noted(probes.accumulations.name, (-1, 0), (0, 0)), [0])
    with pytest.raises(UsageError, match="noted no parameters"):
        watched_checks.assert_parameter_hooks_fire(noted(probes.hook_calls.name, (0, 1)), [0])


def test_parameters_of_several_optimizers_have_numbers_of_their_own() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    seen: list[int] = []
    told: list[Callable[[torch.optim.Optimizer], None]] = []
    notes = Notes(0, seen.append, lambda: 0, lambda _: None, told.append)
    probes.accumulations(torch.nn.Linear(1, 1), notes)
    for of_one_optimizer in (weights[:2], weights[2:]):
        told[0](torch.optim.SGD(of_one_optimizer))
    sum(weights, torch.zeros(1)).backward()  # type: ignore[no-untyped-call]
    assert (seen[:2], sorted(seen[2:])) == ([2, 1], [0, 1, 2])


def test_what_is_given_away_alive_is_found() -> None:
    watched_checks.assert_copies(noted(probes.scribbled.name, (0, [])))
    with pytest.raises(Violation, match="what the trainer shows is what it trains"):
        watched_checks.assert_copies(noted(probes.scribbled.name, (0, ["parameters()['weight']"])))
    for seldom in (noted(probes.scribbled.name, (1, [])), noted(probes.hook_calls.name, (0, []))):
        with pytest.raises(UsageError, match=r"next: run it with probes\.scribbled"):
            watched_checks.assert_copies(seldom)


@pytest.mark.parametrize("change", ["one more", "one less", "of another module"])
def test_hooks_that_fire_otherwise_are_found(change: str, engine: SimulatedEngine) -> None:
    execution = Run(engine, "fully_shard")(CASE, probes=(probes.hook_calls,))
    watched_checks.assert_hooks_fire(execution)
    observations = execution.ranks[0].observations
    first = next(entry for entry in observations if entry[3] == ("forward", "tail"))
    if change != "one more":
        observations.remove(first)
    if change != "one less":
        observations.append((*first[:3], ("forward", "tail.linear0" if change == "one more" else "nowhere")))
    with pytest.raises(Violation, match="hooks do not fire as on a single device"):
        watched_checks.assert_hooks_fire(execution)


def test_an_interruption_is_noted_and_the_step_taken_again(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference")
    for interrupt in (probes.interrupt_forward, probes.interrupt_backward):
        execution = run(CASE, probes=(interrupt,))
        assert watched_checks.interruptions(execution, interrupt) == 1
        assert watched_checks.right(execution, run.answer(CASE))


def test_what_an_interruption_leaves_behind_is_named_only_if_the_training_is_right_without(
    engine: SimulatedEngine,
) -> None:
    run = Run(engine, "fully_shard", installs=())
    answer, wrong = run.answer(CASE), run(CASE)
    for value in wrong.ranks[0].steps[0].params.values():
        value += 1
    with pytest.raises(Violation, match="leaves something behind"):
        watched_checks.assert_undisturbed(wrong, answer, lambda: run(CASE))
    with pytest.raises(Violation) as found:
        watched_checks.assert_undisturbed(wrong, answer, lambda: wrong)
    assert "leaves something behind" not in str(found.value)


def test_noise_that_an_interruption_changes_is_a_violation(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference")
    case = noisy(replace(CASE, mesh=MeshSpec(2), step=StepSpec(clipping="exact", steps=2)))
    whole, other = run(case), run(case)
    watched_checks.assert_noise_undisturbed(other, whole)
    next(iter(other.ranks[-1].steps[1].params.values())).flatten()[0] += 1
    with pytest.raises(Violation, match="leaves something behind") as found:
        watched_checks.assert_noise_undisturbed(other, whole)
    assert "step 1, rank 1" in found.value.where


def test_a_layer_that_a_later_step_leaves_out_is_asked_for_no_hook(engine: SimulatedEngine) -> None:
    """By the parameters of that step: by those of the first, a sample would go through the layer."""
    token = decode(
        "v2:AAAAVrHVUvh4-fgd9xKrRsquyGUu7bMu1E9E5F2jwZx3jQjkXUgJNXiybimoxgbGNTCcwYkCmpWNRrPyQGRlIypm5ZzMtNTkyuScVL2M_PxscB"
        "5AuBeWkmsB02NWiQ"
    )
    run = Run(engine, "reference")
    noted = probes.hook_calls.saw(run(token.case, probes=(probes.hook_calls,)).ranks[0])
    first, second = ([value for _, at, value in noted if at == step] for step in range(2))
    assert len(first) > len(second)
    assert check_case(chapters()["lifecycle.hooks"], run, token.case, diagnose=False).status == "holds"


def test_a_layer_behind_one_that_has_a_surrogate_is_asked_for_the_hooks_that_this_one_lets_fire(
    engine: SimulatedEngine,
) -> None:
    """A GroupNorm gives the layer, which some samples leave out, a number above zero only with its surrogate."""
    layers = (LayerSpec(1, bias=True, kind="group_norm"), LayerSpec(2, used="routed"))
    case = replace(
        CASE,
        model=ModelSpec(layers, "signal", features=1, length=2),
        layout=BatchLayout("contiguous", 1),
        arithmetic=Arithmetic(project=False),
        seed=9365,
    )
    assert check_case(chapters()["lifecycle.hooks"], Run(engine, "reference"), case, diagnose=False).status == "holds"


def test_no_step_is_interrupted_in_a_layer_that_some_ranks_leave_out(engine: SimulatedEngine) -> None:
    law, run = chapters()["lifecycle.interrupted"], Run(engine, "reference")
    cases = list(enumeration.distinct(law.draw(run.features, (1, 2, 3)), 200, 0))
    assert len(cases) == 200
    assert not [one for one in cases if one.requires() & {"routed", "routed-private"}]
    others = enumeration.distinct(chapters()["lifecycle.hooks"].draw(run.features, (1, 2, 3)), 200, 0)
    assert [one for one in others if "routed" in one.requires()]
