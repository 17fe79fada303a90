"""What a step may hold gathered: the schedule's bound, on made-up events and on fully_shard with one unit kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpcheck.adapters import load
from fsdpcheck.adapters.builtin import _fsdp2_features as _fsdp2
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.checks.gathered_parameters import assert_gathered_once, assert_scheduled
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import models

THREE = ModelSpec((LayerSpec(3), LayerSpec(5), LayerSpec(2)), features=4, units=(1, 1, 1))
FREED = TrainingCase(THREE, MeshSpec(2), BatchLayout("contiguous", 4))
KEPT = replace(FREED, mesh=MeshSpec(2, reshard_after_forward=False))
ROOT = "instrument"


GATHER = Collective("all_gather", (0, 1), "world", 0, inputs=(("float64", (4,)),))


def events(case: TrainingCase, *noted: tuple[str, int | None, str]) -> Execution:
    """One step, alike on all ranks: (kind, number of the unit at work or None for the root, those gathered).

    What is gathered and was not before has been gathered in between.
    """
    layers = [layer.name for layer in models.layer_names(case)]
    notes: list[Any] = [("call", "", [], 0)]
    trace: list[Collective] = []
    before = ""
    for kind, unit, held in noted:
        layer = ROOT if unit is None else layers[unit]
        trace += [
            replace(GATHER, subject=f"units.{number}", sequence=len(trace)) for number in sorted({*held} - {*before})
        ]
        before = held
        notes.append(
            (kind, layer, [f"{ROOT}.weight", *(f"{layers[int(number)]}.weight" for number in held)], len(trace))
        )
    observations = [(probes.gathered.name, "noted", 0, note) for note in notes]
    ranks = [RankResult(rank, {}, [StepRecord({})], observations, tuple(trace)) for rank in range(case.world_size)]
    return Execution("made up", RunRequest(case, "x"), ranks)


FORWARD = [("forward", 0, "0"), ("forward", 1, "1"), ("forward", 2, "2"), ("forward", None, "")]
BACKWARD = [("backward", None, ""), ("backward", 2, "2"), ("backward", 1, "1"), ("backward", 0, "0")]
AHEAD = [("forward", 0, "01"), *FORWARD[1:], ("backward", None, "2"), ("backward", 2, "12"), *BACKWARD[2:]]
ALL = [("forward", 0, "0"), ("forward", 1, "01"), ("forward", 2, "012"), ("forward", None, "012")]
ALL += [("backward", None, "012"), ("backward", 2, "012"), ("backward", 1, "01"), ("backward", 0, "0")]
TWICE = [*ALL[:-3], ("backward", 2, "012"), ("backward", 1, "012"), ("backward", 0, "012"), *ALL[-3:]]
FROZEN = [*ALL[:4], ("backward", None, "012"), ("backward", 2, "012"), ("backward", 1, "01")]


@pytest.mark.parametrize(
    ("case", "noted"),
    [(FREED, FORWARD + BACKWARD), (FREED, AHEAD), (KEPT, ALL), (KEPT, TWICE), (KEPT, FROZEN), (KEPT, AHEAD)],
    ids=["one at a time", "gathered ahead", "kept", "kept for two backwards", "kept without a backward", "freed early"],
)
def test_what_a_schedule_has_gathered_holds(case: TrainingCase, noted: list[tuple[str, int | None, str]]) -> None:
    assert_scheduled(events(case, *noted))
    if (case, noted) != (KEPT, AHEAD):  # it holds less than it may, and gathers for that more often
        assert_gathered_once(events(case, *noted))


@pytest.mark.parametrize(
    ("case", "noted", "said", "cause"),
    [
        (KEPT, [*ALL[:3], ("forward", None, ""), *ALL[4:]], "units.0 gathered 2 times", "kept for its backward"),
        (KEPT, FORWARD + BACKWARD, "units.0 gathered 2 times", "kept for its backward"),
        (KEPT, [*TWICE[:7], ("backward", 0, ""), *TWICE[8:10], ("backward", 0, "")], "", ""),
        (KEPT, [*TWICE[:5], ("backward", 2, "1"), ("backward", 1, "012"), *TWICE[7:]], "", ""),
        (FREED, [*FORWARD[:3], ("forward", None, "0"), *BACKWARD], "units.0 gathered 3 times", "within one forward"),
        (FREED, [*AHEAD[:4], ("backward", None, "02"), *AHEAD[5:]], "units.0 gathered 3 times", "within one forward"),
        (KEPT, AHEAD, "units.0 gathered 2 times", "kept for its backward"),
    ],
)
def test_a_unit_that_is_gathered_again_is_found(
    case: TrainingCase, noted: list[tuple[str, int | None, str]], said: str, cause: str
) -> None:
    execution = events(case, *noted)
    if not said:
        assert_gathered_once(execution)
        return
    with pytest.raises(Violation, match="more often than its schedule has it") as found:
        assert_gathered_once(execution)
    assert (found.value.got, cause in found.value.cause) == (said, True)


@pytest.mark.parametrize(
    ("case", "place", "held", "message"),
    [
        (FREED, 1, "01", r"units\.0 gathered in the forward of units\.1"),
        (FREED, 0, "02", r"units\.2 gathered in the forward of units\.0"),
        (FREED, 3, "2", "units.2 gathered in the forward of instrument"),
        (FREED, 4, "1", "units.1 gathered in the backward of instrument"),
        (FREED, 6, "12", r"units\.2 gathered in the backward of units\.1"),
        (KEPT, 6, "012", r"units\.2 gathered in the backward of units\.1"),
        (KEPT, 0, "02", r"units\.2 gathered in the forward of units\.0"),
    ],
)
def test_a_unit_that_stays_gathered_is_found(case: TrainingCase, place: int, held: str, message: str) -> None:
    noted = FORWARD + BACKWARD if case is FREED else [*ALL]
    noted[place] = (*noted[place][:2], held)
    with pytest.raises(Violation, match=message) as found:
        assert_scheduled(events(case, *noted))
    over = "forward" if case is FREED or place < 4 else "backward"
    assert found.value.cause == f"a unit is not freed when its {over} is over"


def test_what_an_evaluation_leaves_gathered_is_kept_for_the_next_pass_alone() -> None:
    """Where parameters are kept after the forward, no backward frees those of an evaluation."""
    evaluation, again = ALL[:4], ("call", None, "")
    begun = [("forward", 0, "012"), ("forward", 1, "012"), *ALL[2:]]
    assert_scheduled(events(KEPT, *evaluation, again, *begun))
    with pytest.raises(Violation, match=r"units\.2 gathered in the forward of units\.0"):
        assert_scheduled(events(FREED, *FORWARD, again, *begun))
    with pytest.raises(Violation, match=r"units\.2 gathered in the forward of units\.0"):
        assert_scheduled(events(KEPT, *ALL, again, *begun))


def test_a_rank_without_samples_may_leave_its_model_alone() -> None:
    """But no rank that has some."""
    idle = replace(FREED, layout=BatchLayout("ragged", 2, counts=(2, 0)))
    execution = events(idle, *FORWARD, *BACKWARD)
    execution.ranks[1] = RankResult(1, {}, [StepRecord({})])
    assert_scheduled(execution)
    with pytest.raises(UsageError, match="noted no calls of the model"):
        assert_scheduled(replace(execution, request=RunRequest(FREED, "x")))


def test_modules_that_show_nothing_gathered_say_nothing() -> None:
    silent = [(kind, unit, "") for kind, unit, _ in FORWARD]
    with pytest.raises(NotExact, match="no unit is seen gathered"):
        assert_scheduled(events(FREED, *silent))
    assert_scheduled(events(replace(FREED, mesh=MeshSpec(1)), *silent))


def test_a_run_without_the_watcher_is_refused() -> None:
    seen = events(FREED)
    for rank in seen.ranks:
        rank.observations.clear()
    with pytest.raises(UsageError, match=r"run it with probes\.gathered"):
        assert_scheduled(seen)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_one_unit_of_fully_shard_kept_after_its_forward_is_found(
    number: int, ranks_here: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest = Run(ranks_here, "fully_shard"), _fsdp2.set_up
    assert_scheduled(run(FREED, probes=(probes.gathered,)))

    def kept(model: Any, setup: Any) -> None:
        honest(model, setup)
        model.units[number].set_reshard_after_forward(False)

    monkeypatch.setattr(_fsdp2, "set_up", kept)
    with pytest.raises(Violation, match=rf"units\.{number} gathered in the forward of"):
        assert_scheduled(run(FREED, probes=(probes.gathered,)))


@pytest.mark.parametrize(("adapter", "families"), [("fully_shard", {"none"}), ("reference", {"none", "probe"})])
def test_cases_of_the_memory_law_have_several_steps_and_units(adapter: str, families: set[str]) -> None:
    features, law = load(adapter).features, chapters()["lifecycle.memory"]
    drawn = enumeration.distinct(law.draw(features, (2, 3)), 50)
    assert law.space.ranks == 2
    assert {case.step.clipping for case in drawn} == families
    assert {case.step.steps for case in drawn} == {2, 3}
    assert {case.mesh.reshard_after_forward for case in drawn} == {True, False}
    assert min(case.model.unit_count for case in drawn if case.model.tied is None) == 3
    assert all(case.requires() <= features.accepts for case in drawn)
