"""Checks of checkpoints and of units, on made-up pieces and moments: each thing that can be wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from fsdpcheck.adapters.contract import Moment, Stored, UnitState
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.lifecycle import assert_aliased, assert_few_gathered, assert_released
from fsdpcheck.checks.state import assert_stored
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError, UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes

MODEL = ModelSpec((LayerSpec(1),))
WHOLE = torch.arange(6.0, dtype=torch.float64).view(2, 3)


def saved(**parameters: Tensor) -> Execution:
    """One step of one rank, which had ``parameters`` when it was saved."""
    return Execution(
        "made up", RunRequest(TrainingCase(MODEL), "x"), [RankResult(0, {}, [StepRecord({}, saved=parameters)])]
    )


def piece(row: int, value: Tensor, name: str = "w", sizes: tuple[int, ...] = (1, 3)) -> Stored:
    return Stored(name, (2, 3), (row, 0), sizes, value)


def rows() -> list[Stored]:
    return [piece(row, WHOLE[row : row + 1].clone()) for row in (0, 1)]


def test_pieces_that_are_each_parameter_once_are_right() -> None:
    assert_stored(saved(w=WHOLE), rows(), 0)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (rows()[:1], "each tensor once.*3 elements in no piece, 0 in several"),
        ([*rows(), rows()[0]], "each tensor once.*0 elements in no piece, 3 in several"),
        ([rows()[0], piece(1, WHOLE[:1].clone())], "does not hold the parameters"),
        ([*rows(), *(piece(p.offsets[0], p.value, "extra") for p in rows())], "extra"),
        ([], "missing"),
        ([rows()[0], piece(1, WHOLE[1:2])], "the memory around a parameter"),
        ([rows()[0], piece(1, WHOLE[1, :2].clone()[None])], "the pieces it names"),
    ],
    ids=["a gap", "twice", "other values", "too many", "none", "with its storage", "another shape"],
)
def test_what_is_wrong_with_a_checkpoint_is_found(pieces: list[Stored], message: str) -> None:
    with pytest.raises(Violation, match=f"(?s){message}"):
        assert_stored(saved(w=WHOLE), pieces, 0)


def moment(size: int, length: int, of: str = "w") -> list[Stored]:
    """A state of so many elements in one piece, whose file holds ``length``."""
    return [Stored("optimizer.state.w.exp_avg", (size,), (0,), (size,), torch.ones(length)[:size], True, of)]


def test_a_state_as_large_as_its_parameter_is_right() -> None:
    for state in (moment(6, 6), moment(1, 1), moment(9, 9, of="")):
        assert_stored(saved(w=WHOLE), [*rows(), *state], 0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (moment(6, 9), "9 elements in the file"),
        (moment(9, 9), "9 elements.*6 at most, as w has"),
        (moment(6, 6) * 2, "each tensor once"),
    ],
    ids=["with its storage", "with padding", "twice"],
)
def test_what_is_wrong_with_a_state_is_found(state: list[Stored], message: str) -> None:
    with pytest.raises(Violation, match=f"(?s){message}"):
        assert_stored(saved(w=WHOLE), [*rows(), *state], 0)


def seen(moment: str, *units: UnitState, reshard: bool = True, world_size: int = 1) -> Execution:
    """One step at one moment of which each rank has these units, and at all others what is right."""
    inner = max(len(units) - 1, 0)
    model = ModelSpec((LayerSpec(1),) * max(inner, 1), units=(1,) * inner)
    case = TrainingCase(model, MeshSpec(world_size, 1, reshard), step=StepSpec(normaliser=world_size))
    right = [unit() for _ in units]
    moments = [(name, -1 if name == "after_init" else 0) for name in ("after_init", *get_args(Moment), "after_step")]
    shown = [(probes.units.name, name, step, list(units) if name == moment else right) for name, step in moments]
    ranks = [RankResult(rank, {}, [StepRecord({})], list(shown) if units else []) for rank in range(world_size)]
    return Execution("made up", RunRequest(case, "x"), ranks)


def unit(gathered: int = 0, unreduced: tuple[str, ...] = (), aliased: bool = True) -> UnitState:
    return UnitState("u", gathered, unreduced, aliased)


def test_beside_the_root_one_unit_may_be_gathered_or_all_that_are_kept_for_a_backward() -> None:
    both = unit(8), unit(8), unit(8)
    assert_few_gathered(seen("after_forward", unit(8), unit(8), unit()))
    assert_few_gathered(seen("after_forward", *both, reshard=False))
    with pytest.raises(Violation, match="inner units stay gathered"):
        assert_few_gathered(seen("after_forward", *both))
    with pytest.raises(Violation, match="inner units stay gathered"):
        assert_few_gathered(seen("after_reshard", *both, reshard=False))


def test_between_steps_nothing_is_gathered_and_no_local_gradient_is_left() -> None:
    assert_released(seen("after_forward", unit(8, ("w",))))
    assert_released(seen("after_step", unit()))
    with pytest.raises(Violation, match="gathered between steps"):
        assert_released(seen("after_step", unit(8)))
    with pytest.raises(Violation, match="outlive their step"):
        assert_released(seen("after_step", unit(), unit(0, ("w",))))


def test_on_one_rank_nothing_is_held_twice() -> None:
    assert_aliased(seen("after_init", unit()))
    with pytest.raises(Violation, match="held twice"):
        assert_aliased(seen("after_init", unit(), unit(aliased=False)))
    with pytest.raises(UsageError, match="W = 1"):
        assert_aliased(seen("after_init", unit(), world_size=2))


def test_a_run_without_the_observer_is_refused() -> None:
    with pytest.raises(UsageError, match="observed no units"):
        assert_released(seen("after_step"))


@pytest.mark.parametrize("check", [assert_few_gathered, assert_released, assert_aliased])
def test_units_that_are_not_shown_are_asked_for(check: Callable[[Execution], None]) -> None:
    execution = seen("after_step", unit(), unit())
    check(execution)
    for shown in ([], [unit()]):
        execution.ranks[0].observations[-1] = (probes.units.name, "after_step", 0, shown)
        with pytest.raises(AdapterError, match=f"(?s)got     {len(shown)} units.*wanted  2: the root, then the 1"):
            check(execution)


def test_an_adapter_that_cannot_save_is_told_so(tmp_path: object) -> None:
    engine = SimulatedEngine()
    with pytest.raises(AdapterError, match="without save, load"):
        Run(engine, "fully_shard")(TrainingCase(MODEL), save_to=str(tmp_path), load_from=str(tmp_path))
    engine.close()


def test_noise_that_would_move_parameters_is_no_reason_for_other_bits_at_another_number_of_ranks() -> None:
    """Parameters that noise has moved have gradients whose sum over five samples rounds, in each order otherwise."""
    engine = SimulatedEngine()
    case = TrainingCase(
        ModelSpec((LayerSpec(1),), features=3),
        layout=BatchLayout(batch_size=5),
        step=StepSpec(clipping="exact"),
    )
    verdict = check_case(chapters()["state.resharded"], Run(engine, "reference"), case)
    engine.close()
    assert verdict.status == "holds", verdict.finding
