"""check_law: what becomes of a law that holds, breaks, rejects everything, is not promised, or has an install that is
never hit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpcheck.case import Arithmetic, TrainingCase
from fsdpcheck.case.profiles import WORLD_SIZES
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import BuiltSpace
from tests.common.laws_by_hand import SPACE, FakeEngine, a_case, a_law, too_large


@pytest.fixture
def run() -> Run:
    return Run(FakeEngine(), "fully_shard")


def test_a_law_may_judge_another_case_than_one_that_is_not_exact_itself(run: Run) -> None:
    large = replace(a_case(1, 2), arithmetic=Arithmetic(weights=1 << 20, inputs=1 << 20, project=False))
    with pytest.raises(NotExact):
        run.answer(large)
    verdict = check_law(a_law(lambda case, run: None, space=BuiltSpace(build=lambda features, sizes: [large])), run)
    assert (verdict.status, verdict.cases) == ("holds", 1), verdict.reason
    assert verdict.census["W=1"] == 1
    assert "non-zero gradient" not in verdict.census


def test_a_law_that_holds_counts_distinct_cases(run: Run) -> None:
    seen = list[TrainingCase]()
    verdict = check_law(a_law(lambda case, run: seen.append(case)), run, "ci")
    assert (verdict.status, verdict.exit_code, verdict.cases) == ("holds", 0, len(set(seen)))
    assert verdict.cases > 40
    assert sum(verdict.census.get(f"W={world}", 0) for world in range(1, 14)) == verdict.cases
    verdict.raise_if_broken()


def test_a_law_that_needs_several_ranks_draws_no_smaller_world_and_never_passes_without_one(run: Run) -> None:
    seen = list[int]()
    law = a_law(lambda case, run: seen.append(case.world_size), space=SPACE.but(ranks=2))
    assert check_law(law, run, "ci", (1, 2, 3)).status == "holds"
    assert set(seen) == {2, 3}
    verdict = check_law(law, run, "ci", (1,))
    assert (verdict.status, verdict.exit_code, verdict.cases) == ("no case", 2, 0)
    assert verdict.reason == "the law says nothing on fewer than 2 ranks, asked were 1"
    alone = replace(run.features, max_world_size=1)
    assert law.not_promised(alone) == "the law says nothing on fewer than 2 ranks, the adapter takes 1"
    assert a_law(too_large).not_promised(alone) == ""


def test_the_same_arguments_give_the_same_cases_and_another_seed_others(run: Run) -> None:
    def cases(**more: int) -> list[TrainingCase]:
        seen = list[TrainingCase]()
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
    heard, ran = list[TrainingCase](), list[TrainingCase]()

    def body(case: TrainingCase, run: Run) -> None:
        assert heard[-1] == case
        ran.append(case)

    assert check_law(a_law(body), run, on_case=lambda law, run, case: heard.append(case)).status == "holds"
    assert heard == ran != []


def test_only_the_asked_world_sizes_are_drawn(run: Run) -> None:
    verdict = check_law(a_law(lambda case, run: None), run, world_sizes=(3,))
    assert verdict.census["W=3"] == verdict.cases > 0


@pytest.mark.nightly
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
    def body(case: TrainingCase, run: Run) -> None:
        raise NotExact("too many bits")

    verdict = check_law(a_law(body), run)
    assert (verdict.status, verdict.cases, verdict.exit_code) == ("no case", 0, 3)
    assert verdict.rejected > 0
    assert verdict.reason.endswith("rejected as not exact\n  most often: too many bits")
    with pytest.raises(AssertionError, match="no case could be judged"):
        verdict.raise_if_broken()


def test_rejected_cases_are_counted_apart(run: Run) -> None:
    def body(case: TrainingCase, run: Run) -> None:
        if case.world_size == 1:
            raise NotExact("too many bits")

    verdict = check_law(a_law(body), run, "ci")
    assert (verdict.status, "W=1" in verdict.census) == ("holds", False)
    assert verdict.rejected > 0


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

    def both_ways(case: TrainingCase, run: Run) -> None:
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
