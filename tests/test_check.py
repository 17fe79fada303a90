"""check_law: what becomes of a law that holds, breaks, rejects everything, is flaky, is not promised, or has a bug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fsdpcheck import judging
from fsdpcheck.adapters._base import Features
from fsdpcheck.case import Arithmetic, BatchLayout, Case, LayerSpec, MeshSpec, ModelSpec
from fsdpcheck.check import check_law
from fsdpcheck.errors import AdapterError, NoProgress, NotExact, UsageError, Violation
from fsdpcheck.execution import Execution, Failure, RankState, RunRequest
from fsdpcheck.law import Law
from fsdpcheck.plan import WORLD_SIZES
from fsdpcheck.replay import decode
from fsdpcheck.runner import Run


class FakeEngine:
    """Gives the failure it is told to give; no rank runs."""

    name = "simulated"

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure, self.requests = failure, list[RunRequest]()

    def run(self, request: RunRequest) -> Execution:
        self.requests.append(request)
        return Execution(self.name, request, [], self.failure, install_hits=dict.fromkeys(request.installs, 0))

    def close(self) -> None:
        pass


def a_case(world: int, batch: int, seed: int = 0) -> Case:
    return Case(
        model=ModelSpec(layers=(LayerSpec(width=1),)),
        mesh=MeshSpec(dp_shard=world),
        layout=BatchLayout(batch_size=batch),
        arithmetic=Arithmetic(project=False),
        seed=seed,
    )


def draw(features: Features, world_sizes: tuple[int, ...]) -> st.SearchStrategy[Case]:
    return st.builds(a_case, st.sampled_from(world_sizes), st.integers(1, 8), st.integers(0, 1000))


def a_law(body: Callable[[Case, Run], None], **changes: Any) -> Law:
    fields = {"name": "fake.law", "promise": "plain", "observe": frozenset({"params"}), "draw": draw}
    fields |= {"needs_traits": frozenset(), "body": body, "statement": "A law\nin words.\n\nMore.", "where": "here:1"}
    return Law(**{**fields, **changes})


@pytest.fixture
def run() -> Run:
    return Run(FakeEngine(), "fully_shard")


def too_large(case: Case, run: Run) -> None:
    if case.layout.batch_size > 3:
        raise Violation("too large", got=str(case.layout.batch_size), wanted="<= 3", where="layout")


def test_a_law_may_judge_another_case_than_one_that_is_not_exact_itself(run: Run) -> None:
    large = replace(a_case(1, 2), arithmetic=Arithmetic(weights=1 << 20, inputs=1 << 20, project=False))
    with pytest.raises(NotExact):
        run.answer(large)
    verdict = check_law(a_law(lambda case, run: None, draw=lambda features, sizes: st.just(large)), run)
    assert (verdict.status, verdict.cases) == ("holds", 1), verdict.reason
    assert verdict.census["W=1"] == 1
    assert "non-zero gradient" not in verdict.census


def test_a_law_that_holds_counts_distinct_cases(run: Run) -> None:
    seen = list[Case]()
    verdict = check_law(a_law(lambda case, run: seen.append(case)), run, "ci")
    assert (verdict.status, verdict.exit_code, verdict.cases) == ("holds", 0, len(set(seen)))
    assert verdict.cases > 40
    assert sum(verdict.census.get(f"W={world}", 0) for world in range(1, 14)) == verdict.cases
    verdict.raise_if_broken()


def test_a_law_that_needs_several_ranks_draws_no_smaller_world_and_never_passes_without_one(run: Run) -> None:
    seen = list[int]()
    law = a_law(lambda case, run: seen.append(case.world_size), ranks=2)
    assert check_law(law, run, "ci", (1, 2, 3)).status == "holds"
    assert set(seen) == {2, 3}
    verdict = check_law(law, run, "ci", (1,))
    assert (verdict.status, verdict.exit_code, verdict.cases) == ("no case", 2, 0)
    assert verdict.reason == "the law says nothing on fewer than 2 ranks, asked were 1"
    alone = replace(run.features, max_world_size=1)
    assert law.not_promised(alone) == "the law says nothing on fewer than 2 ranks, the adapter takes 1"
    assert a_law(too_large).not_promised(alone) == ""


def test_the_same_arguments_give_the_same_cases_and_another_seed_others(run: Run) -> None:
    def cases(**more: int) -> list[Case]:
        seen = list[Case]()
        check_law(a_law(lambda case, run: seen.append(case)), run, **more)
        return seen

    assert cases() == cases()
    assert cases() != cases(seed=1)


def test_a_finding_is_the_smallest_case(run: Run) -> None:
    verdict = check_law(a_law(too_large), run, "ci")
    assert (verdict.status, verdict.exit_code) == ("finding", 1)
    assert verdict.finding is not None
    token = decode(verdict.finding.token)
    assert token.case == a_case(world=1, batch=4)
    assert (verdict.finding.got, verdict.finding.guarantee, verdict.finding.kind) == ("4", "A law in words.", "value")
    with pytest.raises(Violation, match="fsdpcheck replay 'v2:"):
        verdict.raise_if_broken()


def test_on_case_hears_of_every_case_before_it_runs(run: Run) -> None:
    heard, ran = list[Case](), list[Case]()

    def body(case: Case, run: Run) -> None:
        assert heard[-1] == case
        ran.append(case)

    assert check_law(a_law(body), run, on_case=lambda law, run, case: heard.append(case)).status == "holds"
    assert heard == ran != []


def test_only_the_asked_world_sizes_are_drawn(run: Run) -> None:
    verdict = check_law(a_law(lambda case, run: None), run, world_sizes=(3,))
    assert verdict.census["W=3"] == verdict.cases > 0


def test_a_profile_has_its_own_world_sizes(run: Run) -> None:
    """Where none are asked for: five in the quick profile, 13 ranks too in the nightly one, and seldom in ci."""
    shares = {}
    for profile in ("quick", "ci", "nightly"):
        verdict = check_law(a_law(lambda case, run: None), run, profile)
        counts = {int(label[2:]): n for label, n in verdict.census.items() if label.startswith("W=")}
        assert set(counts) <= set(WORLD_SIZES[profile])
        shares[profile] = sum(n for world, n in counts.items() if world > 5) / verdict.cases
    assert shares["quick"] == 0
    assert set(counts) == {1, 2, 3, 4, 5, 6, 7, 8, 13}
    assert 0.05 < shares["ci"] < 0.35 < shares["nightly"]


def test_a_law_that_is_not_promised_is_never_run(run: Run) -> None:
    verdict = check_law(a_law(too_large, promise="private"), run)
    assert (verdict.status, verdict.cases, verdict.exit_code) == ("not promised", 0, 0)
    assert "no promise 'private': trains plainly" in verdict.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observe": frozenset({"norms"})}, "does not show norms"),
        ({"needs_traits": frozenset({"nonsense"})}, "does not accept nonsense"),
        ({"needs_promises": frozenset({"noise"})}, "no promise 'noise': trains plainly"),
    ],
)
def test_a_law_that_needs_what_the_adapter_lacks_is_not_promised(run: Run, changes: dict[str, Any], said: str) -> None:
    verdict = check_law(a_law(too_large, **changes), run)
    assert (verdict.status, said in verdict.reason) == ("not promised", True)


def test_a_promised_law_that_judges_no_case_is_a_failure(run: Run) -> None:
    def body(case: Case, run: Run) -> None:
        raise NotExact("too many bits")

    verdict = check_law(a_law(body), run)
    assert (verdict.status, verdict.cases, verdict.exit_code) == ("no case", 0, 3)
    assert verdict.rejected > 0
    assert verdict.reason.endswith("rejected as not exact\n  most often: too many bits")
    with pytest.raises(AssertionError, match="no case could be judged"):
        verdict.raise_if_broken()


def test_rejected_cases_are_counted_apart(run: Run) -> None:
    def body(case: Case, run: Run) -> None:
        if case.world_size == 1:
            raise NotExact("too many bits")

    verdict = check_law(a_law(body), run, "ci")
    assert (verdict.status, "W=1" in verdict.census) == ("holds", False)
    assert verdict.rejected > 0


def test_a_law_that_breaks_only_once_is_an_error_that_says_so(run: Run) -> None:
    seen = set[Case]()

    def body(case: Case, run: Run) -> None:
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
    calls = list[Case]()

    def body(case: Case, run: Run) -> None:
        calls.append(case)
        raise error

    verdict = check_law(a_law(body), run)
    assert (verdict.status, verdict.exit_code, len(calls)) == ("error", code, 1)
    assert str(error) in verdict.reason
    assert "replay with: fsdpcheck replay 'v2:" in verdict.reason


def test_the_replay_line_of_an_error_repeats_what_a_token_may_not_import(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from fsdpcheck.adapters.fully_shard import FullyShard as Mine\n")
    run = Run(FakeEngine(), f"{file}:Mine", installs=("own.module:plant",))

    def body(case: Case, run: Run) -> None:
        raise ZeroDivisionError("oops")

    line = check_law(a_law(body), run).reason.splitlines()[-1]
    assert line.endswith(f"' --adapter {file}:Mine --install own.module:plant")


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("oops"), 3), (AdapterError("x"), 2), (NoProgress("x"), 1)]
)
def test_an_error_while_shrinking_keeps_the_finding_and_is_told(run: Run, error: Exception, code: int) -> None:
    def body(case: Case, run: Run) -> None:
        if case.layout.batch_size > 3:
            broken.append(case)
            raise Violation("broken", got="1", wanted="0", where="here")
        if broken:
            raise error

    broken = list[Case]()
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
        monkeypatch.setattr(judging.drawing, "distinct", fail)

    def body(case: Case, run: Run) -> None:
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

    def body(case: Case, run: Run) -> None:
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

    def body(case: Case, run: Run) -> None:
        raise Violation("broken", got="1", wanted="0", where="here")

    verdict = check_law(a_law(body), run, deadline=Clock(0))
    assert verdict.finding is not None
    assert "a smaller case may exist" in verdict.finding.note


def test_an_install_that_is_never_hit_is_said(run: Run) -> None:
    planted = replace(run, installs=("fsdpcheck.impl.faults:averaged_twice",))
    verdict = check_law(a_law(lambda case, run: run(case) and None), planted)
    assert verdict.status == "holds"
    assert "never hit" in verdict.reason


def test_an_install_that_is_hit_in_the_first_run_of_a_law_alone_was_hit(run: Run) -> None:
    class Once(FakeEngine):
        """What is planted acts in the reversed order of ranks only."""

        def run(self, request: RunRequest) -> Execution:
            hits = dict.fromkeys(request.installs, int(request.schedule == "reversed"))
            return replace(super().run(request), install_hits=hits)

    def both_ways(case: Case, run: Run) -> None:
        run(case, schedule="reversed"), run(case)

    planted = replace(run, engine=Once(), installs=("fsdpcheck.impl.faults:averaged_twice",))
    verdict = check_law(a_law(both_ways), planted)
    assert (verdict.status, verdict.reason) == ("holds", "")
    assert "never hit" in check_law(a_law(lambda case, run: run(case) and None), planted).reason


def test_a_law_asks_for_what_it_observes() -> None:
    engine = FakeEngine()
    run = Run(engine, "reference")
    check_law(a_law(lambda case, run: run(case) and None, observe=frozenset({"grads"})), run)
    assert {request.observe for request in engine.requests} == {frozenset({"params", "grads"})}


def test_ctrl_c_gets_through(run: Run) -> None:
    def body(case: Case, run: Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_law(a_law(body), run)
