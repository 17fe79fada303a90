"""The same case, another result: a finding of its own kind, shown on processes; its token replays as the same one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fsdpcheck.engines._common import hosts
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import Execution, RankResult, StepRecord
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.roots import same
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.judging import nondeterminism
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.session import run as session
from tests.common.cases_by_hand import SMALLEST

TOYS = Path(__file__).parents[1] / "toys" / "undetermined.py"
FRESH = "the same case gives other results, each time in fresh processes"
HISTORY = "the same case gives other results, depending on what ran before in the processes"


def _fresh() -> SimulatedEngine:
    """In place of new real processes: nothing has been trained in its own."""
    hosts.close()
    return SimulatedEngine()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[[], SimulatedEngine]:
    monkeypatch.setattr(nondeterminism, "ProcessesEngine", _fresh)
    return _fresh


def _found(verdict: Verdict, what: str) -> Finding:
    assert (verdict.status, verdict.exit_code) == ("finding", 1), verdict.reason
    assert verdict.finding is not None
    assert (verdict.finding.kind, verdict.finding.what) == ("undetermined", what)
    return verdict.finding


def _checked_and_replayed(adapter: str, what: str, engine: SimulatedEngine) -> Finding:
    found = _found(check_law(chapters()["training.plain"], Run(engine, f"{TOYS}:{adapter}"), world_sizes=(1,)), what)
    _fresh()
    again = _found(session.replayed(decode(found.token), "simulated"), what)
    assert again.token == found.token
    assert same(again, found)
    return found


@pytest.mark.usefixtures("stand_ins")
def test_another_result_each_time_is_told_with_both_values_and_the_place(engine: SimulatedEngine) -> None:
    found = _checked_and_replayed("random", FRESH, engine)
    assert found.got.startswith("run 1 gave ")
    assert found.wanted.startswith("in each run what run 0 gave: ")
    assert "rank 0, before the first step, " in found.where


@pytest.mark.nightly
@pytest.mark.usefixtures("stand_ins")
def test_state_that_outlives_a_training_is_told_as_that(engine: SimulatedEngine) -> None:
    assert _checked_and_replayed("again", HISTORY, engine).where.endswith("one after another in the same processes")


@pytest.mark.nightly
@pytest.mark.usefixtures("stand_ins")
def test_nothing_is_said_of_an_implementation_where_the_reference_is_undetermined_too(
    engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(engine, f"{TOYS}:random")
    run(SMALLEST)
    assert run.asked is not None
    assert nondeterminism.difference(run, run.asked) is not None
    monkeypatch.setattr(nondeterminism, "_REFERENCE", f"{TOYS}:random")
    assert nondeterminism.difference(run, run.asked) is None


@pytest.mark.parametrize("adapter", ["reference", "fully_shard"])
def test_what_is_right_does_not_vary(adapter: str, engine: SimulatedEngine) -> None:
    run = Run(engine, adapter)
    run(SMALLEST)
    assert run.asked is not None
    assert not nondeterminism.varies(run, run.asked)


def test_bits_are_compared_whatever_the_strides_of_a_tensor() -> None:
    """torch calls one element contiguous with any stride, and none of no elements; neither can be viewed as bytes."""
    numbers = torch.arange(1.0, 13.0).reshape(3, 4)
    apart = torch.as_strided(numbers, (1, 1), (4, 3))
    assert apart.is_contiguous()
    for strange in (apart, apart[0], numbers.t(), numbers[:, ::2], numbers[:0].t(), torch.tensor(math.nan)):
        plain = torch.tensor(strange.tolist()).reshape(strange.shape)
        assert nondeterminism._plain(strange) == nondeterminism._plain(plain)
    assert nondeterminism._plain(apart) != nondeterminism._plain(2 * apart)
    assert nondeterminism._plain(torch.tensor(0.0)) != nondeterminism._plain(torch.tensor(-0.0))


@pytest.mark.nightly
@pytest.mark.parametrize(("adapter", "what"), [("random", FRESH), ("again", HISTORY)])
def test_it_is_shown_on_real_processes(adapter: str, what: str, engine: SimulatedEngine) -> None:
    _checked_and_replayed(adapter, what, engine)


def test_draws_accounts_and_outputs_differ_too() -> None:
    """A sampler has no parameters: of a fault that changes what it draws it was said that it changes nothing."""

    def shown(drawn: Any = (1, 2), probe: int = 1, **changes: Any) -> Execution:
        step = replace(StepRecord({}, outputs=torch.tensor([1.0]), accounted=[(1.0, 0.5, 1)]), **changes)
        observed = [("sampler", "epoch", 0, drawn), ("memory", "after", 0, probe)]
        return Execution("none", cast(Any, None), [RankResult(0, steps=[step], observations=observed)])

    for changes in ({"drawn": (2, 1)}, {"outputs": torch.tensor([2.0])}, {"accounted": [(1.0, 0.5, 2)]}):
        assert nondeterminism.first_difference(shown(), shown(**changes)), changes
    assert nondeterminism.first_difference(shown(), shown()) is None
    assert nondeterminism.first_difference(shown(), shown(probe=2)) is None, "what a probe saw may be of the moment"


def test_the_first_call_that_differs_is_told_in_words_or_by_its_fields() -> None:
    def shown(*calls: Collective) -> Execution:
        return Execution("none", cast(Any, None), [RankResult(0, trace=calls)])

    call = Collective("all_reduce", (0, 1), "world", 0, "sum", inputs=(("float32", (2,)),))
    later, of_another = replace(call, sequence=1), replace(call, group_name="rows")
    assert nondeterminism.first_difference(shown(call, later), shown(call, later)) is None
    assert nondeterminism.first_difference(shown(call, later), shown(call)) == (
        "rank 0, its collective 1",
        "all_reduce(float32[2]) sum #1 on ranks [0, 1]",
        "none",
    )
    told = ("rank 0, its collective 0", "group_name 'world'", "group_name 'rows'")
    assert nondeterminism.first_difference(shown(call), shown(of_another)) == told
