"""Optimizers that read whole matrices, or whole rows: drawn where they are exact, wrong for what a rank has of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck import adapters, strategies
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.case.training import OptimizerKind
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration

KINDS: tuple[OptimizerKind, ...] = ("newton_schulz", "row_scaled")
CASE = TrainingCase(
    ModelSpec((LayerSpec(4, activation="relu", bias=True), LayerSpec(3)), features=3, units=(1, 1)),
    MeshSpec(2),
    BatchLayout("contiguous", 6),
    StepSpec(normaliser=4),
    seed=3,
)
LOCAL = "tests/toys/local_optimizers.py"


def _case(kind: OptimizerKind) -> TrainingCase:
    return replace(CASE, step=replace(CASE.step, optimizer=OptimizerSpec(kind, 1)))


def test_drawn_cases_have_them_where_they_are_exact_and_accepted() -> None:
    features = adapters.declared("ddp").features
    drawn = enumeration.distinct(strategies.cases_of(strategies.PLAIN, features, (1, 2, 3)), 150)
    for kind in KINDS:
        met = {case.arithmetic.dtype for case in drawn if case.step.optimizer.kind == kind}
        assert met == {"float64"}, kind
    narrow = replace(features, accepts=features.accepts - {"matrix-optimizer", "row-optimizer"})
    for space, accepted in ((strategies.PLAIN, narrow), (strategies.GLOBAL_NORM, features)):
        drawn = enumeration.distinct(strategies.cases_of(space, accepted, (1, 2)), 80)
        assert not any(case.step.optimizer.kind in KINDS for case in drawn)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in KINDS for name in ("fully_shard", "ddp", "tensor_parallel")),
        ("row_scaled", f"{LOCAL}:blocks"),
    ],
)
def test_they_hold_on_dtensors_and_whole_rows_as_blocks_too(
    kind: OptimizerKind, name: str, engine: SimulatedEngine
) -> None:
    """Blocks of rows are what a rank has of a matrix that is sharded in its first dimension."""
    run, case = Run(engine, name), _case(kind)
    split = replace(
        case, mesh=MeshSpec(axes=(("tp", 2),)), model=replace(case.model, layers=(LayerSpec(4), LayerSpec(2)))
    )
    for one in (case, replace(case, mesh=MeshSpec(3))) if name != "tensor_parallel" else (split,):
        execution = run(one, {"grads"})
        assert_gradients_equal(execution, run.answer(one))
        assert_parameters_equal(execution, run.answer(one))


@pytest.mark.parametrize(
    ("kind", "toy", "said"),
    [
        ("newton_schulz", "blocks", "updates the rows that it has as if they were the whole matrix"),
        ("newton_schulz", "pieces", "pieces of one dimension"),
        ("row_scaled", "pieces", "pieces of one dimension"),
    ],
)
def test_what_reads_a_ranks_part_is_found_by_no_other_cases_and_named(
    kind: OptimizerKind, toy: str, said: str, engine: SimulatedEngine
) -> None:
    run, case = Run(engine, f"{LOCAL}:{toy}"), _case(kind)
    for other in ("sgd", "adamw"):
        one = replace(case, step=replace(case.step, optimizer=OptimizerSpec(other)))
        assert_parameters_equal(run(one), run.answer(one))
    with pytest.raises(Violation) as raised:
        assert_parameters_equal(run(case), run.answer(case))
    assert said in raised.value.cause


@pytest.mark.nightly
def test_a_law_meets_an_optimizer_of_blocks(engine: SimulatedEngine) -> None:
    found = check_law(chapters()["training.plain"], Run(engine, f"{LOCAL}:blocks"), profile="ci").finding
    assert found is not None
    assert "as if they were the whole matrix" in found.cause
