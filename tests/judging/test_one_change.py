"""One change at a time: which are tried, that each gives another case, and what is said of those that hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdpcheck import strategies
from fsdpcheck.adapters import load
from fsdpcheck.case import BatchLayout, Case, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.case.sampler import SamplerCase, SamplingSpec
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging import one_change
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.one_change import CHANGES, in_words, lacks, tried
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration

LAYERS = (LayerSpec(2, bias=True, activation="relu"), LayerSpec(2, kind="rms_norm"))
CASE = TrainingCase(
    ModelSpec(LAYERS, features=2, units=(1,)),
    MeshSpec(2, dp_replicate=2),
    BatchLayout("ragged", 5, counts=(2, 2, 1, 0)),
    StepSpec(steps=2, micro_batches=2, normaliser=4, optimizer=OptimizerSpec("adamw", weight_decay=0.5)),
)
PLAIN = TrainingCase(ModelSpec((LayerSpec(1),)))


def told(case: Case, holds: Callable[[TrainingCase], bool | None], *more: Case) -> str:
    return in_words(tried(case, (case, PLAIN, *more), holds))  # type: ignore[arg-type]


def test_the_changes_that_make_a_law_hold_are_named_and_the_others_counted() -> None:
    said = told(CASE, lambda case: case.step.micro_batches == 1 or not case.mesh.dp_replicate > 1)
    assert said.startswith("holds with one change: one micro-batch; or one rank; or no replicas; breaks with ")
    assert said.endswith(" others as well")


def test_unequal_numbers_of_micro_batches_are_made_equal_by_each_change_that_needs_it() -> None:
    unequal = replace(CASE, step=replace(CASE.step, micro_batches=2, sync_every=False, unequal=True))
    said = told(unequal, lambda case: not case.step.unequal)
    assert said.startswith("holds with one change: as many micro-batches on each rank; or one micro-batch; or ")
    assert "one rank" in said


def test_what_no_single_change_mends_is_said_and_so_is_what_only_other_numbers_mend() -> None:
    assert told(CASE, lambda case: False).startswith("breaks with each of ")
    assert told(CASE, lambda case: case.seed != CASE.seed).startswith("holds with other numbers alone, none of ")


def test_what_cannot_be_told_counts_for_nothing() -> None:
    assert told(CASE, lambda case: None) == ""
    assert told(CASE, lambda case: True if case.step.steps == 1 else None) == "holds with one change: one step"


def test_many_changes_are_not_all_listed() -> None:
    said = told(CASE, lambda case: True)
    assert said.count("; or ") == 4
    assert said.endswith(" others")


def test_only_what_some_drawn_case_is_like_is_tried() -> None:
    seen: list[TrainingCase] = []
    told(CASE, lambda case: seen.append(case))
    assert any(case.world_size == 1 for case in seen)
    seen.clear()
    tried(CASE, (CASE, replace(CASE, seed=1)), lambda case: seen.append(case))  # type: ignore[arg-type, return-value]
    assert [case.seed for case in seen] == [CASE.seed + 1], "no case was drawn that is more ordinary"


def test_a_case_that_trains_nothing_has_its_fields_set_back_one_by_one() -> None:
    case = SamplerCase(SamplingSpec(records=5, batch_size=2, shuffle=True), MeshSpec(2))
    ordinary = SamplerCase(SamplingSpec(records=1), MeshSpec())
    said = in_words(tried(case, (case, ordinary), lambda one: not one.sampling.shuffle))  # type: ignore[union-attr]
    assert said.startswith("holds with one change: sampling.shuffle = False; breaks with ")


RARE = (
    replace(CASE, step=replace(CASE.step, max_grad_norm=1.0)),
    replace(CASE, step=replace(CASE.step, optimizer=OptimizerSpec(groups="vectors apart"))),
    replace(PLAIN, mesh=MeshSpec(axes=(("tp", 2),)), step=StepSpec(normaliser=2)),
    replace(CASE, step=replace(CASE.step, micro_batches=2, sync_every=False, unequal=True)),
    replace(PLAIN, step=StepSpec(clipping="unclipped", noise_multiplier=1.0)),
    TrainingCase(
        ModelSpec((LayerSpec(1), LayerSpec(1)), units=(1,)), step=StepSpec(clipping="exact", clip_groups="units")
    ),
)
"""Cases that are rarely drawn, or for other laws."""


def test_every_change_is_made_of_some_case_and_gives_one_that_is_so() -> None:
    features = load("reference").features
    spaces = (strategies.PLAIN, strategies.PRIVATE_EXACT)
    drawn = [
        case for one in spaces for case in enumeration.distinct(strategies.cases_of(one, features, (1, 2, 4)), 150)
    ]
    never = {change.words for change in CHANGES}
    for case in (*drawn, *RARE):
        for change in (one for one in CHANGES if not one.is_so(case)):
            try:
                made = change.make(case)
            except one_change.InvalidCase:
                continue
            assert change.is_so(made), (change.words, case.describe(), made.describe())
            assert made.seed == case.seed
            never.discard(change.words)
    assert never <= {"computation in the parameters' dtype"}, "of bfloat16, whose cases take long to draw"


@pytest.mark.parametrize(
    ("fault", "law", "said"),
    [
        ("summed_not_averaged", "training.plain", "holds with one change: one rank; "),
        ("options_of_groups_lost", "training.plain", "one group of parameters"),
    ],
)
def test_a_planted_fault_is_told_by_the_change_that_mends_it(
    fault: str, law: str, said: str, engine: SimulatedEngine
) -> None:
    subject = "ddp" if fault == "options_of_groups_lost" else "reference"
    found = check_law(chapters()[law], Run(engine, subject, installs=(f"fsdpcheck.impl.faults:{fault}",))).finding
    assert found is not None
    assert said in found.when


def test_a_case_lacks_what_it_is_not() -> None:
    assert lacks(CASE, ("one micro-batch", "no replicas"))
    assert not lacks(CASE, ("one micro-batch", "one group of parameters"))
    assert not lacks(PLAIN, ("one micro-batch",))
    assert lacks(PLAIN, ())
