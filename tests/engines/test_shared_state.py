"""What simulated ranks share of an implementation, and write to, is told by name; what is right writes to nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import Execution, Failure, RunRequest
from fsdpcheck.judging.run import Run
from fsdpcheck.session import confirmation
from fsdpcheck.session import run as session
from fsdpcheck.session.plan import Plan

TOYS = Path(__file__).parent.parent / "toys" / "narrowly_wrong.py"
TWO = TrainingCase(
    ModelSpec((LayerSpec(1),)), MeshSpec(2), BatchLayout("contiguous", 2), arithmetic=Arithmetic(project=False)
)


def shared(engine: SimulatedEngine, name: str, case: TrainingCase = TWO) -> tuple[str, ...]:
    return Run(engine, f"{TOYS}:{name}")(case).shared


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("through_one_memory", ("narrowly_wrong.TABLE",)),  # empty again when the run ends
        ("through_a_closure", ("narrowly_wrong._kept",)),
        ("through_a_tensor", ("narrowly_wrong.TOTAL",)),
        ("counted", ("narrowly_wrong.Counted",)),
        ("remembered", ("narrowly_wrong.KEPT",)),
        ("right", ()),
        ("late_leak", ()),
    ],
)
def test_what_ranks_write_to_is_told_by_name(name: str, wanted: tuple[str, ...], engine: SimulatedEngine) -> None:
    assert shared(engine, name) == wanted
    assert shared(engine, name) == wanted  # once seen, it is known of later runs


def test_one_rank_shares_nothing_and_what_each_rank_has_is_not_shared(engine: SimulatedEngine) -> None:
    assert shared(engine, "counted", replace(TWO, mesh=MeshSpec(1))) == ()
    assert shared(engine, "apart") == ()


class Real(Engine):
    """Stands for processes: simulated ranks under that name, or a failure."""

    name = kind = "processes"

    def __init__(self, failure: Failure | None) -> None:
        self.failure, self.ran = failure, 0
        self.simulated = SimulatedEngine()

    def run(self, request: RunRequest) -> Execution:
        self.ran += 1
        execution = self.simulated.run(request)
        execution.failure = execution.failure or self.failure
        return execution

    def declared(self, reference: str) -> Declaration:
        return self.simulated.declared(reference)

    def settle(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self.simulated.close()


def told(monkeypatch: pytest.MonkeyPatch, name: str, failure: Failure | None = None, **more: Any) -> tuple[Any, int]:
    """(the verdict on a toy by training.plain, how many runs the real ranks had)."""
    real, events, opened = Real(failure), list[dict[str, Any]](), confirmation.opened

    def stands_in(stack: Any, engine: str, budget: float | None) -> Engine:
        return real if engine == "processes" else opened(stack, engine, budget)

    monkeypatch.setattr(confirmation, "opened", stands_in)
    plan = Plan((f"{TOYS}:{name}",), ("training.plain",), world_sizes=(1, 2), **more)
    session.run_session(plan, events.append)
    real.close()
    return next(event for event in events if event["event"] == "verdict"), real.ran


def test_a_law_that_holds_where_ranks_share_what_they_write_is_tried_on_real_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict, ran = told(monkeypatch, "counted")
    assert (verdict["status"], ran) == ("holds", confirmation.TRIED)
    assert "simulated ranks share narrowly_wrong.Counted, and write to it; 3 of these cases held" in verdict["reason"]
    verdict, ran = told(monkeypatch, "through_one_memory", Failure("raised", "rank 1 raised KeyError"))
    assert (verdict["status"], verdict["exit_code"], ran) == ("finding", 1, 1)
    assert "which share narrowly_wrong.TABLE: real ranks have one each" in verdict["finding"]["cause"]
    assert verdict["finding"]["engine"] == "processes"


def test_where_nothing_is_shared_no_process_is_started_and_no_confirm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "right")[1] == 0
    verdict, ran = told(monkeypatch, "counted", confirm=False)
    assert (verdict["status"], ran) == ("holds", 0)
    assert verdict["reason"].endswith("and write to it; not tried on real ranks: --no-confirm")


@pytest.mark.nightly
def test_a_reduction_through_one_memory_is_found_on_gloo_processes() -> None:
    events: list[dict[str, Any]] = []
    session.run_session(Plan((f"{TOYS}:through_one_memory",), ("training.plain",), world_sizes=(2,)), events.append)
    verdict, told = (next(e for e in events if e["event"] == kind) for kind in ("verdict", "confirmation"))
    assert (verdict["finding"]["engine"], told["confirmed"]) == ("processes", "yes")
