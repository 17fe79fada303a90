"""The optimizer that reads whole rows: exact where it is said to be, met by drawn cases, wrong for parts of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from fsdpcheck import adapters, strategies
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload.row_scaling import RowScaled, require_exact

CASE = TrainingCase(
    ModelSpec((LayerSpec(4, activation="relu", bias=True), LayerSpec(3)), features=3, units=(1, 1)),
    MeshSpec(2),
    BatchLayout("contiguous", 6),
    StepSpec(normaliser=4, optimizer=OptimizerSpec("row_scaled", 1)),
    seed=3,
)
LOCAL = "tests/toys/local_optimizers.py"


def test_a_step_is_that_of_fractions_on_matrices_and_plain_elsewhere() -> None:
    generator = torch.Generator().manual_seed(5)
    for shape in ((1, 1), (3, 5), (7, 2), (0, 3)):
        matrix, vector = nn.Parameter(torch.zeros(shape).double()), nn.Parameter(torch.zeros(3).double())
        matrix.grad = torch.randint(-9, 10, shape, generator=generator).double() / 8
        vector.grad = torch.tensor([1.0, -2.0, 0.5]).double()
        require_exact(matrix.grad, 53, "here")
        RowScaled([matrix, vector], lr=0.5).step()
        for row, gradient in zip(matrix.detach(), matrix.grad, strict=True):
            total = float(sum(abs(Fraction(float(one))) for one in gradient))
            power = Fraction(2) ** math.frexp(total)[1]
            assert [Fraction(float(one)) for one in row] == [-Fraction(float(one)) / power / 2 for one in gradient]
        assert torch.equal(vector.detach(), -0.5 * vector.grad)


def test_a_row_whose_sum_may_round_is_refused_with_the_bits_that_it_takes() -> None:
    wide = torch.tensor([[1.0, 0.5], [1.0, 2.0**-30]]).double()
    require_exact(wide, 31, "here")
    with pytest.raises(NotExact, match="here, the sum of a row of a gradient: needs 31 bits; had 30"):
        require_exact(wide, 30, "here")
    require_exact(wide[1], 2, "a vector is moved by its gradient")


def test_drawn_cases_have_it_where_it_is_exact_and_accepted() -> None:
    features = adapters.declared("ddp").features
    drawn = enumeration.distinct(strategies.cases_of(strategies.PLAIN, features, (1, 2, 3)), 150)
    met = [case for case in drawn if case.step.optimizer.kind == "row_scaled"]
    assert met
    assert {case.arithmetic.dtype for case in met} == {"float64"}
    narrow = replace(features, accepts=features.accepts - {"row-optimizer"})
    for space, accepted in ((strategies.PLAIN, narrow), (strategies.GLOBAL_NORM, features)):
        drawn = enumeration.distinct(strategies.cases_of(space, accepted, (1, 2)), 80)
        assert not any(case.step.optimizer.kind == "row_scaled" for case in drawn)


@pytest.mark.parametrize("name", ["fully_shard", "ddp", "tensor_parallel", f"{LOCAL}:blocks"])
def test_whole_rows_hold_however_they_lie(name: str, engine: SimulatedEngine) -> None:
    """Blocks of rows are what a rank has of a matrix that is sharded in its first dimension: whole rows."""
    run = Run(engine, name)
    case = replace(
        CASE, mesh=MeshSpec(axes=(("tp", 2),)), model=replace(CASE.model, layers=(LayerSpec(4), LayerSpec(2)))
    )
    for one in (CASE, replace(CASE, mesh=MeshSpec(3))) if name != "tensor_parallel" else (case,):
        execution = run(one, {"grads"})
        assert_gradients_equal(execution, run.answer(one))
        assert_parameters_equal(execution, run.answer(one))


def test_pieces_of_one_dimension_are_found_and_named(engine: SimulatedEngine) -> None:
    run = Run(engine, f"{LOCAL}:pieces")
    with pytest.raises(Violation) as raised:
        assert_parameters_equal(run(CASE), run.answer(CASE))
    assert "pieces of one dimension" in raised.value.cause
