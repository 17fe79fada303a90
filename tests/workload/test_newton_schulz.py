"""The optimizer that reads whole matrices: exact in every order where it is said to be, and met by drawn cases."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck import adapters, strategies
from fsdpcheck.case import (
    BatchLayout,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload.newton_schulz import NewtonSchulz, require_exact

CASE = TrainingCase(
    ModelSpec((LayerSpec(4, activation="relu", bias=True), LayerSpec(3)), features=3, units=(1, 1)),
    MeshSpec(2),
    BatchLayout("contiguous", 6),
    StepSpec(normaliser=4, optimizer=OptimizerSpec("newton_schulz", 1)),
    seed=3,
)
LOCAL = "tests/toys/local_optimizers.py"


def _by_fractions(gradient: Tensor) -> list[list[Fraction]]:
    """3/2 X - 1/2 X X^T X with X the gradient over the least power of two above the sum of absolute values."""
    total = sum(abs(Fraction(float(one))) for one in gradient.reshape(-1))
    power = Fraction(2) ** math.frexp(float(total))[1]
    x = [[Fraction(float(one)) / power for one in row] for row in gradient]
    squares = [[sum((a * b for a, b in zip(one, other, strict=True)), Fraction()) for other in x] for one in x]
    cubes = [
        [sum((s * row[j] for s, row in zip(own, x, strict=True)), Fraction()) for j in range(len(x[0]))]
        for own in squares
    ]
    return [[Fraction(3, 2) * a - c / 2 for a, c in zip(*both, strict=True)] for both in zip(x, cubes, strict=True)]


def test_a_step_is_that_of_fractions_on_matrices_and_plain_elsewhere() -> None:
    generator = torch.Generator().manual_seed(5)
    for rows, columns in ((1, 1), (3, 5), (7, 2)):
        matrix, vector = nn.Parameter(torch.zeros(rows, columns).double()), nn.Parameter(torch.zeros(3).double())
        matrix.grad = torch.randint(-9, 10, (rows, columns), generator=generator).double() / 8
        vector.grad = torch.tensor([1.0, -2.0, 0.5]).double()
        require_exact(matrix.grad, 53, "here")
        NewtonSchulz([matrix, vector], lr=0.5).step()
        assert [[Fraction(float(one)) for one in row] for row in matrix.detach()] == [
            [-one / 2 for one in row] for row in _by_fractions(matrix.grad)
        ]
        assert torch.equal(vector.detach(), -0.5 * vector.grad)


def test_zeros_and_nothing_move_nothing() -> None:
    for shape in ((2, 3), (0, 3)):
        parameter = nn.Parameter(torch.ones(shape).double())
        parameter.grad = torch.zeros(shape).double()
        require_exact(parameter.grad, 1, "here")
        NewtonSchulz([parameter], lr=1.0).step()
        assert torch.equal(parameter.detach(), torch.ones(shape).double())


def test_a_step_that_may_round_is_refused_with_the_bits_that_it_takes() -> None:
    few = torch.tensor([[1.0, 0.5], [0.25, 1.0]]).double()
    require_exact(few, 53, "here")
    many = few + 2.0**-20
    with pytest.raises(NotExact, match=r"here, update of a Newton-Schulz step: needs \d+ bits; had 53"):
        require_exact(many, 53, "here")
    require_exact(many[0], 53, "a vector is moved by its gradient")


def test_drawn_cases_have_it_where_it_is_exact_and_accepted() -> None:
    features = adapters.declared("ddp").features
    drawn = enumeration.distinct(strategies.cases_of(strategies.PLAIN, features, (1, 2, 3)), 150)
    met = [case for case in drawn if case.step.optimizer.kind == "newton_schulz"]
    assert met
    assert {case.arithmetic.dtype for case in met} == {"float64"}
    narrow = replace(features, accepts=features.accepts - {"matrix-optimizer"})
    drawn = enumeration.distinct(strategies.cases_of(strategies.PLAIN, narrow, (1, 2, 3)), 150)
    assert not any(case.step.optimizer.kind == "newton_schulz" for case in drawn)
    clipped = enumeration.distinct(strategies.cases_of(strategies.GLOBAL_NORM, features, (1, 2)), 60)
    assert not any(case.step.optimizer.kind == "newton_schulz" for case in clipped)


@pytest.mark.parametrize("name", ["fully_shard", "ddp", "tensor_parallel"])
def test_an_optimizer_of_whole_matrices_and_of_dtensors_holds(name: str, engine: SimulatedEngine) -> None:
    run = Run(engine, name)
    case = replace(
        CASE, mesh=MeshSpec(axes=(("tp", 2),)), model=replace(CASE.model, layers=(LayerSpec(4), LayerSpec(2)))
    )
    for one in (CASE, replace(CASE, mesh=MeshSpec(3))) if name != "tensor_parallel" else (case,):
        execution = run(one, {"grads"})
        assert_gradients_equal(execution, run.answer(one))
        assert_parameters_equal(execution, run.answer(one))


@pytest.mark.parametrize(
    ("toy", "said"),
    [
        ("blocks", "updates the rows that it has as if they were the whole matrix"),
        ("pieces", "pieces of one dimension"),
    ],
)
def test_an_optimizer_of_what_a_rank_has_is_found_by_no_other_cases_and_named(
    toy: str, said: str, engine: SimulatedEngine
) -> None:
    run = Run(engine, f"{LOCAL}:{toy}")
    for kind in ("sgd", "adamw"):
        case = replace(CASE, step=replace(CASE.step, optimizer=OptimizerSpec(kind)))
        assert_parameters_equal(run(case), run.answer(case))
    with pytest.raises(Violation) as raised:
        assert_parameters_equal(run(CASE), run.answer(CASE))
    assert said in raised.value.cause


@pytest.mark.nightly
def test_a_law_meets_an_optimizer_of_blocks(engine: SimulatedEngine) -> None:
    found = check_law(chapters()["training.plain"], Run(engine, f"{LOCAL}:blocks"), profile="ci").finding
    assert found is not None
    assert "as if they were the whole matrix" in found.cause
