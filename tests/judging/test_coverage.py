"""Too few cases: of a law that was judged on few, or on none of the kind that it is about, nothing "holds"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Arithmetic, OptimizerSpec, TrainingCase, Trait
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import NotApplicable, NotExact, NotOnRanks, UsageError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import census, coverage
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.coverage import Judged, Limits
from fsdpcheck.judging.registry import chapters, law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import BuiltSpace
from fsdpcheck.workload.clip_groups import is_instrument
from tests.common.laws_by_hand import SPACE, FakeEngine, a_case, a_law
from tests.common.tables import each

ALL = Limits(frozenset(get_args(Trait)), (1, 2, 3))
ENOUGH = Judged(15, 15, {})


@pytest.fixture
def run() -> Run:
    return Run(FakeEngine(), "fully_shard")


def of_seeds(features: Features, sizes: tuple[int, ...]) -> st.SearchStrategy[TrainingCase]:
    """Cases that are drawn at little cost, so that hundreds can be rejected."""
    case = a_case(2, 2)
    return st.integers(0, 1 << 30).map(lambda seed: replace(case, seed=seed))


def judges(chosen: Any, error: type[NotExact] = NotExact) -> Any:
    """A body that judges chosen cases and rejects the others."""

    def body(case: TrainingCase, run: Run) -> None:
        if not chosen(case):
            raise error("aten._is_any_true has no rule")

    return body


def only_one() -> Any:
    """A body that judges the first case that comes and rejects all others."""
    seen = list[TrainingCase]()
    return lambda case: not seen.append(case) and case == seen[0]


class Ticks(float):
    """A deadline that is met after some cases."""

    def __new__(cls, cases: int) -> Ticks:
        made = super().__new__(cls, 0.0)
        made.left = cases
        return made

    left: int

    def __lt__(self, now: float) -> bool:
        self.left -= 1
        return self.left < 0


def told(verdict: Verdict) -> tuple[str, int]:
    return verdict.status, verdict.exit_code


def test_one_case_of_hundreds_is_no_pass(run: Run) -> None:
    verdict = check_law(a_law(judges(only_one()), space=BuiltSpace(build=of_seeds)), run)
    assert (*told(verdict), verdict.cases) == ("too few cases", 3, 1)
    assert verdict.rejected > 400
    assert verdict.reason.startswith("judged 1 of 10 cases at least; ")
    assert "rejected, most often: aten._is_any_true has no rule" in verdict.reason
    with pytest.raises(AssertionError, match="too few cases: judged 1 of 10"):
        verdict.raise_if_broken()


def test_cases_of_which_nothing_can_be_said_on_the_adapter_are_its_restriction(run: Run) -> None:
    verdict = check_law(a_law(judges(only_one(), NotApplicable), space=BuiltSpace(build=of_seeds)), run)
    assert told(verdict) == ("too few cases", 2)
    assert "because of most cases the law says nothing on what the adapter accepts and shows" in verdict.reason
    none = check_law(a_law(judges(lambda case: False, NotApplicable), space=BuiltSpace(build=of_seeds)), run)
    assert told(none) == ("no case", 2)
    assert "take the promise away" in none.reason
    assert told(check_law(a_law(judges(lambda case: False), space=BuiltSpace(build=of_seeds)), run)) == ("no case", 3)


def test_a_budget_that_leaves_one_case_of_10_is_no_pass_and_one_that_leaves_10_of_60_is(run: Run) -> None:
    cut = check_law(a_law(lambda case, run: None), run, deadline=Ticks(1))
    assert (*told(cut), cut.cases) == ("too few cases", 4, 1)
    assert "because the budget was spent" in cut.reason
    late = check_law(a_law(lambda case, run: None), run, "ci", deadline=Ticks(10))
    assert told(late) == ("holds", 0)
    assert late.reason == "the budget was spent before all cases were drawn"
    unlabelled = a_law(lambda case, run: None, space=SPACE.but(vacuous_without=("clipped sample",)))
    assert told(check_law(unlabelled, run, "ci", deadline=Ticks(10))) == ("too few cases", 4)


def test_a_law_of_few_cases_holds_when_it_was_judged_on_all(run: Run) -> None:
    def few(features: Features, sizes: tuple[int, ...]) -> list[TrainingCase]:
        return [a_case(1, 1), a_case(1, 2)]

    verdict = check_law(a_law(lambda case, run: None, space=BuiltSpace(build=few)), run)
    assert (*told(verdict), verdict.cases) == ("holds", 0, 2)
    half = check_law(a_law(judges(lambda case: case == a_case(1, 1)), space=BuiltSpace(build=few)), run)
    assert (*told(half), half.cases, half.rejected) == ("holds", 0, 1, 1)


def test_a_label_that_the_cases_lack_is_drawn_for(run: Run) -> None:
    """One draw in 201 has it, and none of the 15 that are drawn for any law."""

    def rarely(features: Features, sizes: tuple[int, ...]) -> st.SearchStrategy[TrainingCase]:
        return st.integers(0, 200).map(lambda n: replace(a_case(2 if n == 117 else 1, 2), seed=n))

    plain = a_law(lambda case, run: None, space=BuiltSpace(build=rarely))
    before = check_law(plain, run)
    assert "several ranks" not in before.census
    wanting = plain.space.but(must_occur=("several ranks",))
    verdict = check_law(replace(plain, space=wanting), run)
    assert (*told(verdict), verdict.cases, verdict.census["several ranks"]) == ("holds", 0, before.cases + 1, 1)
    broken = replace(plain, space=wanting, body=judges(lambda case: case.world_size == 1))
    assert told(check_law(broken, run)) == ("too few cases", 3)


def test_what_cannot_occur_is_told_and_what_a_law_is_vacuous_without_is_missed(run: Run) -> None:
    ordinary = a_law(lambda case, run: None, space=SPACE.but(must_occur=("several ranks",)))
    alone = check_law(ordinary, run, world_sizes=(1,))
    assert (*told(alone), alone.never) == ("holds", 0, ("several ranks",))
    assert Verdict.from_data(alone.to_data()) == alone
    vital = replace(ordinary, space=SPACE.but(vacuous_without=("several ranks",)))
    verdict = check_law(vital, run, world_sizes=(1,))
    assert told(verdict) == ("no case", 2)
    assert verdict.reason == "the law says nothing on fewer than 2 ranks, asked were 1"
    assert "the adapter takes 1" in vital.not_promised(replace(run.features, max_world_size=1))
    assert "the adapter takes 1" in replace(ordinary, takes=2).not_promised(replace(run.features, max_world_size=1))


@pytest.mark.parametrize(
    ("sizes", "why"), [((5,), "a prime number of"), ((2, 7), "a prime number of"), ((3,), "fewer than 4")]
)
def test_a_kind_of_case_that_no_such_ranks_give_is_told_before_any_is_drawn(sizes: tuple[int, ...], why: str) -> None:
    """Nobody can act on "have the adapter accept more", and under torchrun nobody chose the number for the law."""
    replicas = a_law(
        lambda case, run: pytest.fail("drawn in vain"), space=SPACE.but(vacuous_without=("replicated-shards",))
    )
    run, engine = Run(FakeEngine(), "reference"), FakeEngine()
    engine.name = TORCHRUN
    for one, said in ((run, ("no case", 2)), (run.on(engine), ("not asked", 0))):
        verdict = check_law(replicas, one, world_sizes=sizes)
        assert told(verdict) == said
        assert verdict.reason == f"the law says nothing on {why} ranks, asked were {', '.join(map(str, sizes))}"
    assert replicas.vain_on((*sizes, 4)) == replicas.vain_on((6,)) == replicas.vain_on((9,)) == ""
    assert (
        replace(ALL, world_sizes=sizes).against("replicated-shards").startswith(("no more than 3", "it needs a number"))
    )
    assert replace(ALL, world_sizes=(*sizes, 8)).against("replicated-shards") == ""


@pytest.mark.parametrize(("judged", "status"), [(0, "no case"), (2, "too few cases")])
def test_what_the_number_of_ranks_keeps_out_is_no_error_and_under_torchrun_not_asked(judged: int, status: str) -> None:
    """In float32 multiples of 7 times the rounded 1/7 round: what divides before it sums is judged on others."""
    run, engine, seen = Run(FakeEngine(), "ddp"), FakeEngine(), set[TrainingCase]()
    engine.name = TORCHRUN

    def body(case: TrainingCase, run: Run) -> None:
        if case.world_size == 7 and (len(seen) >= judged and case not in seen):
            raise NotOnRanks("multiples of 7 round")
        seen.add(case)

    law = a_law(body)
    alone = check_law(law, run, world_sizes=(7,))
    assert (*told(alone), alone.cases) == (status, 2, judged)
    assert "most often: multiples of 7 round\n" in alone.reason
    assert alone.reason.endswith("ask for other numbers of ranks as well (--world-size), or leave this law out (--law)")
    there = check_law(law, run.on(engine), world_sizes=(7,))
    assert (*told(there), there.reason) == ("not asked", 0, "on 7 ranks: multiples of 7 round")
    assert told(check_law(law, run, world_sizes=(7, 3))) == ("holds", 0)


def test_what_the_user_avoids_is_named_where_the_law_says_nothing_without_it(run: Run) -> None:
    replicas = a_law(lambda case, run: None, space=SPACE.but(vacuous_without=("hsdp",)))
    verdict = check_law(replicas, replace(run, avoid=frozenset({"hsdp", "tied"})))
    assert told(verdict) == ("too few cases", 2)
    assert "never   shards on one mesh axis, replicas on another: without it the law says nothing" in verdict.reason
    assert "because avoided: hsdp" in verdict.reason
    needs = a_law(lambda case, run: None, needs_traits=frozenset({"frozen"}))
    avoided = check_law(needs, replace(run, avoid=frozenset({"frozen"})))
    assert told(avoided) == ("not promised", 0)
    assert avoided.reason == "every case of it demands what is avoided: frozen"


def test_a_sample_of_fewer_cases_than_the_quick_profile_demands_no_label(run: Run) -> None:
    verdict = check_law(
        a_law(lambda case, run: None, space=SPACE.but(vacuous_without=("clipped sample",))), run, most=3
    )
    assert (*told(verdict), verdict.cases) == ("holds", 0, 3)


def test_labels_are_demanded_where_they_can_occur() -> None:
    wanted = ("several ranks", "ragged", "several units", "clipped sample")
    assert coverage.demanded(wanted, (), ALL) == wanted
    assert coverage.demanded(wanted, (), replace(ALL, world_sizes=(1,))) == wanted[2:]
    assert coverage.demanded(wanted, (), replace(ALL, accepts=frozenset())) == (wanted[0], *wanted[2:])
    assert coverage.demanded(wanted, (), replace(ALL, own=True)) == (*wanted[:2], wanted[3])
    assert coverage.demanded((), ("ragged",), replace(ALL, accepts=frozenset())) == ("ragged",)


@pytest.mark.parametrize(
    ("limits", "of", "cause", "said"),
    [
        (ALL, ENOUGH, "drawing", "15 cases judged; 0 rejected"),
        (ALL, replace(ENOUGH, spent=True), "budget", "give it a larger --budget"),
        (replace(ALL, world_sizes=(1,)), ENOUGH, "restriction", "no more than 1 ranks are asked for or taken"),
        (replace(ALL, avoided=frozenset({"frozen"})), ENOUGH, "restriction", "avoided: frozen"),
        (replace(ALL, own=True), ENOUGH, "own model", "next    try more cases (--profile ci)"),
        (replace(ALL, avoided=frozenset({"frozen"})), Judged(15, 1, {}, rejected=659), "drawing", "judged 1 of 15"),
        (ALL, Judged(15, 3, {}, rejected=5, unfit=400), "restriction", "the adapter accepts and shows"),
    ],
)
def test_a_shortfall_names_its_cause(limits: Limits, of: Judged, cause: str, said: str) -> None:
    short = coverage.shortfall(("several ranks",), limits, of)
    assert short is not None
    assert short.cause == cause
    assert said in short.reason
    assert coverage.shortfall((), limits, ENOUGH) is None


def test_a_law_names_labels_that_exist() -> None:
    def body(case: TrainingCase, run: Run) -> None:
        """A law."""

    with pytest.raises(UsageError, match="no label is called 'several moons'"):
        law("fake.moons", promise="plain", space=SPACE.but(must_occur=("several moons",)))(body)


def test_every_law_on_trained_models_says_what_must_occur() -> None:
    """But for those of one case, which the case itself says."""
    fixed = {"samplers.shuffled", "samplers.poisson-rate", "samplers.poisson-room", "privacy.canary"}
    here = (each for each in chapters().values() if Path(each.where.partition(":")[0]).parent.name == "properties")
    assert {each.name for each in here if not each.space.must_occur and not each.space.vacuous_without} == fixed


def test_what_no_mesh_of_the_adapter_can_have_is_not_demanded_and_is_said() -> None:
    labels = ("distributed batch on several ranks", "several units sharded over several ranks", "several units")
    assert coverage.demanded(labels, (), ALL) == labels
    alone = replace(ALL, axes=frozenset({"tp"}))
    assert coverage.demanded(labels, (), alone) == ("several units",)
    assert alone.against(labels[0]) == "no mesh of the adapter has the axis dp_replicate or dp_shard (Features.axes)"
    assert alone.against(labels[1]) == "no mesh of the adapter has the axis dp_shard (Features.axes)"
    vain = coverage.shortfall(labels[:1], alone, ENOUGH)
    assert vain is not None
    assert vain.cause == "restriction"


def test_in_few_bits_a_gradient_must_take_many_and_parameters_must_move() -> None:
    """Where hardly one does, what keeps gradients in bfloat16 would hold, and what casts its copies once for ever."""
    few = replace(ALL, own=True, few_bits=True)
    named = ("several steps", "several units"), ("non-zero gradient",)
    both = ("gradient of more than 8 bits", "later step from other parameters")
    assert coverage.demanded(*named, few) == (*named[1], "several steps", *both)
    assert coverage.demanded(*named, replace(few, few_bits=False)) == (*named[1], "several steps")
    assert coverage.demanded(*named, replace(few, own_optimizer=True)) == (*named[1], "several steps", both[0])
    assert coverage.demanded((), (), few) == ()


def test_a_case_in_few_bits_has_what_its_answer_shows() -> None:
    """A gradient of 9 bits, and parameters that a step has left elsewhere; the harness's layer counts for neither."""
    arithmetic = Arithmetic("float32", inputs=1, project=False, compute="bfloat16")
    case = replace(a_case(2, 2), arithmetic=arithmetic)
    answer = oracle.answer(replace(case, step=replace(case.step, steps=2)))
    first = answer.steps[0]
    name = next(name for name in first.before if not is_instrument(name))
    none = {key: torch.zeros_like(value) for key, value in first.released.items()}
    still = replace(first, released=none)

    def labels(*steps: oracle.StepAnswer, of: TrainingCase = case) -> set[str]:
        few = {"gradient of more than 8 bits", "later step from other parameters"}
        return few & set(census._computed(replace(answer, case=of, steps=steps)))

    assert labels(still, still) == set()
    wide = replace(still, released={**none, name: torch.full_like(none[name], 257.0)})
    assert labels(still, wide) == {"gradient of more than 8 bits"}
    moved = replace(still, before={**first.before, name: first.before[name] + 1})
    assert labels(still, moved) == {"later step from other parameters"}
    layer = next(iter(filter(is_instrument, first.before)))
    assert labels(still, replace(still, before={**first.before, layer: first.before[layer] + 1})) == set()
    assert labels(wide, moved, of=replace(case, arithmetic=replace(arithmetic, compute="dtype"))) == set()


@each(
    ("reached", "counts"),
    [("yyy", False), ("nyy", True), ("yny", True), ("yyn", False), ("-yy", False)],
    ids=["always used", "first used later", "left out in between", "left out at the end", "no sample"],
)
def test_a_parameter_that_a_step_of_adam_leaves_out_is_used_behind_it(reached: str, counts: bool) -> None:
    """In a step of no samples ("-") nothing is left out."""
    case = replace(a_case(2, 2), step=replace(a_case(2, 2).step, steps=3, optimizer=OptimizerSpec("adam")))
    answer = oracle.answer(case)
    name = next(name for name in answer.steps[0].gradients if not is_instrument(name))
    one = {name: torch.ones_like(answer.steps[0].released[name])}
    shown = {"y": {"reached": frozenset(answer.steps[0].gradients)}, "n": {}, "-": {"samples": ()}}
    others = frozenset(answer.steps[0].gradients) - {name}
    steps = tuple(
        replace(step, **{"reached": others, **shown[use]}, released={**step.released, **one})  # type: ignore[arg-type]
        for step, use in zip(answer.steps, reached, strict=True)
    )

    def labels(of: TrainingCase) -> set[str]:
        return {*census._computed(replace(answer, case=of, steps=steps))}

    assert (coverage.LEFT_OUT in labels(case)) is counts
    assert coverage.LEFT_OUT not in labels(replace(case, step=replace(case.step, optimizer=OptimizerSpec())))
