"""The first wrong quantity of a step and the lines around it: of wrong trainers, planted faults, and right steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Adam

from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.clipping import comparable
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import RunRequest
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.first_wrong import first_wrong
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.workload import optimizer

HERE = Path(__file__).parent
LOOPS = "tests.judging.wrong_loops"
PLAIN = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True), LayerSpec(3))),
    MeshSpec(2),
    BatchLayout("contiguous", 4),
    StepSpec(steps=2, normaliser=4, optimizer=OptimizerSpec("sgd", lr_exponent=1)),
)
PRIVATE = replace(
    PLAIN, layout=BatchLayout("contiguous", 5), step=StepSpec(clipping="unclipped")
)  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "step", "said", "seen_in"),
    [
        (
            "scale_forgotten",
            0,
            "the local gradient of instrument.weight on rank 0: is 2 times the right one",
            "backward",
        ),
        ("first_sample_dropped", 0, "the local gradient of ", "backward"),
        ("other_samples", 0, "the samples that arrive at the loss on rank 0: are not this rank's", "local_loss"),
        ("gradient_doubled", 0, "the reduced gradient of ", "step"),
        ("summed_again", 0, "the reduced gradient of ", "step"),
        ("gradients_kept", 1, "the reduced gradient of ", "step"),
        ("rate_halved", 0, "the options of the optimizer on rank 0: have lr of group 0 0.25, wanted 0.5", "step"),
        ("read_before_update", 1, "a parameter as the forward reads it of ", "local_loss"),
        ("never_steps", 0, "the parameters of ", ""),
        ("shown_otherwise", 0, "the parameters before the first step, tail.linear0.weight on rank 0", ""),
    ],
)
def test_the_first_wrong_quantity_of_a_wrong_loop_is_told(
    loop: str, step: int, said: str, seen_in: str, engine: SimulatedEngine
) -> None:
    found = first_wrong(Run(engine, f"{LOOPS}:{loop}"), PLAIN)
    first, *others = found.text.splitlines()
    if loop == "shown_otherwise":
        assert first == f"the first to differ: {said}"
        return
    assert first.startswith(f"the first to differ, in step {step}: {said}"), found.text
    if loop == "never_steps":
        assert others[-1] == "no optimizer that the adapter was given has stepped on this rank"
        return
    assert f" in {seen_in}: " in others[-1], found.text
    assert found.place in others[-1]


def test_collectives_between_the_last_right_line_and_the_first_wrong_one_are_told(engine: SimulatedEngine) -> None:
    found = first_wrong(Run(engine, f"{LOOPS}:summed_again"), PLAIN)
    assert any(
        line.startswith("in between: ")
        and f"{HERE}/wrong_loops.py" in line
        and "dist.all_reduce(parameter.grad)" in line
        for line in found.text.splitlines()
    ), found.text


@pytest.mark.parametrize(
    ("name", "case", "said", "lines"),
    [
        (
            "shard_starts_rounded_down",
            PRIVATE,
            "the first to differ: the parameters before the first step, tail.linear1.weight on rank 0",
            ("until then: all_gather of (whole tensors, to show) at ", ": _all_gather(", ", called at "),
        ),
        ("squared_norm_off_by_1e_9", PRIVATE, "the first to differ, in step 0: the norms on rank ", ()),
        ("factor_off_by_1e_9", PRIVATE, "the first to differ, in step 0: the clip factors on rank ", ()),
        ("summed_not_averaged", PRIVATE, "the first to differ, in step 0: the reduced gradient of ", ()),
        (
            "summed_not_averaged",
            PLAIN,
            "the first to differ, in step 0: the reduced gradient of ",
            (
                "in between: reduce_scatter of (root) at ",
                "impl/faults/sharding.py",
                " return original(unit, full, axis) * ",
            ),
        ),
        ("update_skipped_on_last_rank", PRIVATE, "the first to differ, in step 0: the parameters of ", ()),
    ],
)
def test_the_first_wrong_quantity_of_a_planted_fault_is_told(
    name: str, case: TrainingCase, said: str, lines: tuple[str, ...], engine: SimulatedEngine
) -> None:
    right = first_wrong(Run(engine, "reference"), case)
    assert right.text.startswith("right, as far as they are compared bit for bit: ")
    assert right.place == ""
    found = first_wrong(Run(engine, "reference", installs=(f"fsdpcheck.impl.faults:{name}",)), case).text
    assert found.startswith(said), found
    assert all(line in found for line in lines), found


GLOBAL = replace(PLAIN, step=StepSpec(normaliser=4, max_grad_norm=0.5))
PROBE = replace(PRIVATE, step=StepSpec(clipping="probe"))


@pytest.mark.parametrize(
    ("install", "case", "said"),
    [
        ("tests.mechanisms.planted:norms_of_ranks_averaged", GLOBAL, "the global norm on rank 0: is "),
        (
            "tests.mechanisms.planted:clipped_the_wrong_way",
            GLOBAL,
            "the factor that clips all gradients on rank 0: is ",
        ),
        ("fsdpcheck.impl.faults:summed_not_averaged", GLOBAL, "the global norm on rank 0: is "),
        ("fsdpcheck.impl.faults:summed_not_averaged", PROBE, "the reduced gradient of "),
    ],
)
def test_what_may_round_is_compared_beyond_rounding(
    install: str, case: TrainingCase, said: str, engine: SimulatedEngine
) -> None:
    """Gradients clipped by their norm have a direction, right in sums that are not averaged, a norm, and a factor."""
    right = first_wrong(Run(engine, "reference"), case).text
    assert right.startswith("right, as far as they are compared bit for bit: "), right
    assert "; up to rounding: the reduced gradient" in right, right
    found = first_wrong(Run(engine, "reference", installs=(install,)), case)
    assert found.text.startswith(f"the first to differ, in step 0: {said}"), found.text


def test_noise_is_not_taken_for_a_wrong_gradient(engine: SimulatedEngine) -> None:
    case = replace(PROBE, step=replace(PROBE.step, noise_multiplier=1.0))
    found = first_wrong(Run(engine, "reference"), case)
    assert (found.place, found.text.endswith("the options of the optimizer")) == ("", True), found.text


def test_it_is_that_of_a_run_with_the_features_in_use(engine: SimulatedEngine) -> None:
    case = TrainingCase(
        ModelSpec((LayerSpec(3),)), MeshSpec(2), BatchLayout("contiguous", 5), StepSpec(clipping="unclipped")
    )
    run = Run(engine, "reference_fsdp2", installs=("fsdpcheck.impl.faults:ignored_gradients_stay_local",))
    assert first_wrong(run, case).text.startswith("right, as far as they are compared bit for bit: ")
    asked = RunRequest(case, "reference_fsdp2", using=("ignored",))
    assert first_wrong(run, case, asked).text.startswith(
        "the first to differ, in step 0 (with ignored in use): the reduced gradient"
    )
    other = first_wrong(run, replace(case, mesh=MeshSpec(3)), asked)
    assert (other.text, other.quantity) == ("", "")
    assert other.unknown.startswith("the law compares cases with each other")


@pytest.mark.parametrize(
    "fault", ["summed_not_averaged", pytest.param("factor_off_by_1e_9", marks=pytest.mark.nightly)]
)
def test_a_finding_says_where_nothing_is_known(fault: str, engine: SimulatedEngine) -> None:
    """A bound is exceeded, and no bit is compared; beside what is known otherwise the sentence is left out."""
    real = fault == "summed_not_averaged"
    law = chapters()["rounding.gradients" if real else "clipping.factors"]
    run = Run(engine, "reference", installs=(f"fsdpcheck.impl.faults:{fault}",))
    found = check_law(law, run, "quick", (2,)).finding
    assert found is not None
    said = "which quantity is wrong first is not known: on real numbers quantities are judged within bounds"
    assert (said in found.stage) == real, found.stage
    assert ("the first to differ" in found.stage) != real, found.stage


RIGHT = (
    ("reference", "training.plain"), ("reference", "clipping.coefficients"), ("fully_shard", "training.evaluation"),
    ("ddp", "global-norm.update"), ("pipeline", "training.plain"), (f"{LOOPS}:masters_updated", "training.plain"),
)  # fmt: skip
LAWS = ("training.plain", "training.evaluation", "clipping.norms", "clipping.coefficients", "global-norm.update")
ALL_RIGHT = tuple(
    (adapter, law)
    for adapter in (
        "reference", "reference_fsdp2", "reference:bookkeeping", "fully_shard", "fsdp1", "ddp", "zero_redundancy",
        "tensor_parallel", "sequence_parallel", "pipeline", "pipeline:one_f_one_b", "ddp:finding_unused",
    )
    for law in LAWS
)  # fmt: skip


def stories(engine: SimulatedEngine, adapter: str, law: str, count: int, seed: int) -> tuple[int, list[str]]:
    """(cases that were looked at, what was said to be wrong in one)."""
    found: tuple[int, list[str]] = pytest.importorskip("benchmarks.stories").stories(engine, adapter, law, count, seed)
    return found


@pytest.mark.parametrize(("adapter", "law"), RIGHT)
def test_of_a_right_step_nothing_is_told(adapter: str, law: str, engine: SimulatedEngine) -> None:
    looked_at, told = stories(engine, adapter, law, 6, 3)
    assert (told, looked_at > 3) == ([], True)


def test_behind_a_step_that_may_round_otherwise_nothing_is_compared(
    ranks_here: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of factors between powers of two weighted sums round; a number midway between two integers may go either way.

    The projection as it was, for its factor leaves no number of a drawn case midway. Gradients of the ranks are a few
    ulps above and below: one of the two goes the other way than the answer does, however this CPU's kernels round.
    """
    monkeypatch.setattr(optimizer, "TOWARDS_ZERO", 1)
    case = TrainingCase(
        ModelSpec(
            (
                LayerSpec(2, True, "relu", kind="conv", kernel=2, stride=2, padding=1, dilation=2),
                LayerSpec(2, True, "hardtanh", "bias", used="twice"),
            ),
            "signal",
            2,
            2,
            units=(1, 1),
        ),
        MeshSpec(2),
        BatchLayout("ragged", 2, counts=(2, 0)),
        StepSpec("l1", 3, 2, normaliser=4, reduction="sum", clipping="probe", optimizer=OptimizerSpec("adam", 1)),
        Arithmetic("float32", inputs=1),
        seed=8814,
    )
    run = Run(ranks_here, "reference:bookkeeping")
    answer, exact_step, reached = run.answer(case), Adam.step, []
    for ulps in (-4, 4):

        def step(self: Adam, closure: Any = None, off: float = 1 + ulps * 2**-23) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(off)
            return exact_step(self, closure)

        monkeypatch.setattr(Adam, "step", step)
        execution = run(case, {"norms"})
        reached.append([number for number, _ in comparable(execution, answer)])
        found = first_wrong(run, case)
        assert (found.place, found.text.startswith("right")) == ("", True)
    assert [0] in reached
    for result in completed(execution):
        for value in result.steps[0].params.values():
            value.neg_()
    assert [number for number, _ in comparable(execution, answer)] == [0]


@pytest.mark.nightly
@pytest.mark.parametrize(("adapter", "law"), ALL_RIGHT)
def test_of_many_right_steps_nothing_is_told(adapter: str, law: str, engine: SimulatedEngine) -> None:
    if chapters()[law].not_promised(Run(engine, adapter).features):
        pytest.skip("not promised")
    looked_at, told = stories(engine, adapter, law, 120, 0)
    assert (told, looked_at > 60) == ([], True)
