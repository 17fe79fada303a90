"""check_law: what becomes of a law that is flaky, raises, breaks its diagnosis, or runs out of its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import AdapterError, NoProgress, UsageError
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import exploration
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.run import Run
from tests.common.laws_by_hand import FakeEngine, a_law


@pytest.fixture
def run() -> Run:
    return Run(FakeEngine(), "fully_shard")


def test_a_law_that_breaks_only_once_is_an_error_that_says_so(run: Run) -> None:
    seen = set[TrainingCase]()

    def body(case: TrainingCase, run: Run) -> None:
        if case not in seen:
            seen.add(case)
            raise Violation("sometimes", got="1", wanted="0", where="here")

    verdict = check_law(a_law(body), run)
    assert (verdict.status, verdict.exit_code) == ("error", 3)
    assert "not deterministic (sometimes)" in verdict.reason


@pytest.mark.parametrize(
    ("error", "code"),
    [(ZeroDivisionError("oops"), 3), (AdapterError("no step"), 2), (UsageError("no"), 2), (NoProgress("slow"), 4)],
)
def test_what_is_no_violation_is_an_error_and_not_made_smaller(run: Run, error: Exception, code: int) -> None:
    calls = list[TrainingCase]()

    def body(case: TrainingCase, run: Run) -> None:
        calls.append(case)
        raise error

    verdict = check_law(a_law(body), run)
    assert (verdict.status, verdict.exit_code, len(calls)) == ("error", code, 1)
    assert str(error) in verdict.reason
    assert "replay with: fsdpcheck replay 'v2:" in verdict.reason


def test_the_replay_line_of_an_error_repeats_what_a_token_may_not_import(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from fsdpcheck.adapters.builtin.fully_shard import FullyShard as Mine\n")
    run = Run(FakeEngine(), f"{file}:Mine", installs=("own.module:plant",))

    def body(case: TrainingCase, run: Run) -> None:
        raise ZeroDivisionError("oops")

    line = check_law(a_law(body), run).reason.splitlines()[-1]
    assert line.endswith(f"' --adapter {file}:Mine --install own.module:plant --laws here")  # where the law says it is


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("oops"), 3), (AdapterError("x"), 2), (NoProgress("x"), 1)]
)
def test_an_error_while_shrinking_keeps_the_finding_and_is_told(run: Run, error: Exception, code: int) -> None:
    def body(case: TrainingCase, run: Run) -> None:
        if case.layout.batch_size > 3:
            broken.append(case)
            raise Violation("broken", got="1", wanted="0", where="here")
        if broken:
            raise error

    broken = list[TrainingCase]()
    verdict = check_law(a_law(body), run)
    assert verdict.finding is not None
    assert (verdict.status, verdict.exit_code) == ("finding", code)
    assert verdict.finding.note.startswith("an error ended the shrinking; a smaller case may exist: ")
    assert str(error) in verdict.finding.note
    assert "replay with: fsdpcheck replay 'v2:" in verdict.finding.note


@pytest.mark.parametrize("drawing_fails", [False, True])
def test_a_failing_diagnosis_keeps_the_finding_and_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, drawing_fails: bool
) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError("oops")

    if drawing_fails:
        monkeypatch.setattr(exploration.enumeration, "distinct", fail)

    def body(case: TrainingCase, run: Run) -> None:
        raise Violation("broken", got="1", wanted="0", where="here", cause="" if drawing_fails else fail)

    verdict = check_law(a_law(body), run)
    assert verdict.finding is not None
    assert (verdict.status, verdict.exit_code) == ("finding", 3)
    assert "fsdpcheck failed to look for the cause" in verdict.finding.note
    assert "ZeroDivisionError: oops" in verdict.finding.note


@pytest.mark.parametrize(("kind", "code"), [("adapter", 2), ("no progress", 4)])
def test_a_run_that_says_nothing_of_the_law_is_no_finding(kind: Any, code: int) -> None:
    run = Run(FakeEngine(Failure(kind, "a report")), "fully_shard")
    verdict = check_law(a_law(lambda case, run: run(case) and None), run)
    assert (verdict.status, verdict.exit_code) == ("error", code)


def test_a_finding_carries_the_kind_and_place_of_the_runs_failure() -> None:
    failure = Failure("deadlock", "a report", (RankState(0, "done"), RankState(1, "blocked", where="train.py:7")))

    def body(case: TrainingCase, run: Run) -> None:
        raise Violation("did not complete", got=run(case).failure.text, wanted="an end", where="everywhere")

    finding = check_law(a_law(body), Run(FakeEngine(failure), "fully_shard")).finding
    assert finding is not None
    assert (finding.kind, finding.place, finding.got) == ("deadlock", "train.py:7", "a report")


def test_a_spent_budget_ends_the_drawing_and_is_said(run: Run) -> None:
    verdict = check_law(a_law(lambda case, run: None), run, deadline=0.0)
    assert (verdict.status, verdict.exit_code) == ("no case", 4)


def test_a_budget_spent_while_shrinking_keeps_the_finding(run: Run) -> None:
    limits = iter([float("inf")])

    class Clock(float):
        """Never reached until the law has broken once."""

        def __lt__(self, now: float) -> bool:
            return now > next(limits, 0.0)

    def body(case: TrainingCase, run: Run) -> None:
        raise Violation("broken", got="1", wanted="0", where="here")

    verdict = check_law(a_law(body), run, deadline=Clock(0))
    assert verdict.finding is not None
    assert "a smaller case may exist" in verdict.finding.note


def test_ctrl_c_gets_through(run: Run) -> None:
    def body(case: TrainingCase, run: Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_law(a_law(body), run)
