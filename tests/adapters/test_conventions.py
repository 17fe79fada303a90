"""Conventions that an adapter declares: the right ones hold, a wrong one is a finding that names the right one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpcheck import adapters, strategies
from fsdpcheck.adapters.contract import ArithmeticRule, FactorRule, Features, GlobalNormRule, NormRule
from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
    from_json,
)
from fsdpcheck.checks.clipping import assert_factors, assert_norms_exact
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError, InvalidCase, NotExact, NotOnRanks
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload.user_model import inspection

HERE = Path(__file__).parent.parent / "toys"
TOYS, MODELS = str(HERE / "conventions.py"), str(HERE / "own_models.py")
W = 3
ANY_SUM = TrainingCase(  # rank r has the samples 2r and 2r + 1: sums that 3 does not divide
    ModelSpec((LayerSpec(2, activation="relu"), LayerSpec(3)), features=2),
    MeshSpec(W),
    BatchLayout("contiguous", 2 * W),
    StepSpec(normaliser=W),
    Arithmetic(inputs=3, world_factors=0),
    seed=6,
)
REDUCED_TWICE = replace(
    ANY_SUM,
    step=StepSpec(micro_batches=2, normaliser=2),
    arithmetic=Arithmetic(weights=2, inputs=2, world_factors=2),
)


def _cause(engine: SimulatedEngine, toy: str, case: TrainingCase) -> str:
    """What is said of the released gradients: "" if they hold."""
    run = Run(engine, f"{TOYS}:{toy}")
    try:
        assert_gradients_equal(run(case, {"grads"}), run.answer(case))
    except Violation as found:
        return found.cause or "no cause"
    return ""


def test_a_division_before_the_sum_breaks_a_sum_that_the_ranks_do_not_divide(engine: SimulatedEngine) -> None:
    assert _cause(engine, "after", ANY_SUM) == ""
    for toy, said in (
        ("divided_before", "every rank's gradient is divided by W before the sum"),
        ("multiplied_before", "every rank's gradient is multiplied by the rounded 1/W before the sum"),
        ("multiplied_after", "the sum over the ranks is multiplied by the rounded 1/W"),
    ):
        cause = _cause(engine, toy, ANY_SUM)
        assert said in cause
        assert "declare ArithmeticRule(averaging='before'), of functions of your own by --averaging before" in cause
        with pytest.raises(NotExact, match="carry the factor W 0 times; wanted 1"):
            Run(engine, f"{TOYS}:{toy}_declared")(ANY_SUM)
        assert _cause(engine, f"{toy}_declared", REDUCED_TWICE) == ""


@pytest.mark.nightly
def test_a_law_finds_an_undeclared_division_and_holds_when_it_is_declared(engine: SimulatedEngine) -> None:
    law = chapters()["training.gradients"]
    found = check_law(law, Run(engine, f"{TOYS}:divided_before"), world_sizes=(W,), most=15)
    assert found.status == "finding"
    assert found.finding is not None
    assert "declare ArithmeticRule(averaging='before')" in found.finding.cause
    held = check_law(law, Run(engine, f"{TOYS}:divided_before_declared"), world_sizes=(W,), most=15)
    assert held.status == "holds"


def test_averages_of_averages_take_one_factor_a_reduction(engine: SimulatedEngine) -> None:
    once = replace(REDUCED_TWICE, arithmetic=replace(REDUCED_TWICE.arithmetic, world_factors=1))
    with pytest.raises(NotExact, match="carry the factor W 1 times; wanted 2, once a reduction"):
        Run(engine, "ddp")(once)
    for world in (3, 5, 6, 7, 11, 13):
        layout = BatchLayout("strided", 2 * world)
        case = replace(REDUCED_TWICE, mesh=MeshSpec(world), layout=layout)
        run = Run(engine, "ddp")
        assert_gradients_equal(run(case, {"grads"}), run.answer(case))
    with pytest.raises(NotOnRanks, match="multiples of 49 times the rounded 1/49 round again"):
        Run(engine, "ddp").answer(replace(REDUCED_TWICE, mesh=MeshSpec(49)))
    single = replace(case, mesh=MeshSpec(7), arithmetic=Arithmetic("float32", world_factors=2))
    with pytest.raises(NotExact, match="multiples of 7"):
        Run(engine, "ddp").answer(single)


def test_what_divides_before_the_sum_is_drawn_where_it_is_exact() -> None:
    """float32 on 7 and 13 ranks, 49 ranks, and fewer factors of W than reductions are not."""
    features = adapters.load("ddp").features
    drawn = enumeration.distinct(strategies.cases_of(strategies.PLAIN_ANY_SUM, features, (3, 7, 13, 49)), 40)
    assert {case.world_size for case in drawn} == {3, 7, 13}
    assert all(case.world_size == 3 for case in drawn if case.arithmetic.dtype == "float32")
    assert all(case.arithmetic.world_factors == case.step.reductions for case in drawn)
    assert any(case.step.reductions == 3 for case in drawn)
    after = enumeration.distinct(
        strategies.cases_of(strategies.PLAIN_ANY_SUM, adapters.load("fully_shard").features, (3,)), 10
    )
    assert {case.arithmetic.world_factors for case in after} == {0, 1}


def test_float32_alone_is_declared_and_drawn() -> None:
    features = replace(adapters.load("reference").features, arithmetic=ArithmeticRule(dtypes=("float32",)))
    drawn = enumeration.distinct(strategies.cases_of(strategies.EQUAL_BITS, features, (1, 2)), 10)
    assert {case.arithmetic.dtype for case in drawn} == {"float32"}


@pytest.mark.parametrize(
    ("laws", "worlds", "most"),
    [
        (("training.plain", "training.gradients", "collectives.plain"), (3,), 3),
        pytest.param((), (3, 5, 7, 13), 60, marks=pytest.mark.nightly),
    ],
)
def test_ddp_holds(laws: tuple[str, ...], worlds: tuple[int, ...], most: int, engine: SimulatedEngine) -> None:
    run = Run(engine, "ddp")
    judged = {}
    for name, law in chapters().items():
        if name in laws or not (laws or law.on_real_ranks or law.not_promised(run.features)):
            judged[name] = check_law(law, run, world_sizes=worlds, most=most).status
    assert set(judged.values()) == {"holds"}, judged


@pytest.mark.parametrize("mistake", ["never_synced", "divided_twice"])
def test_ddp_used_wrongly_is_found(mistake: str, engine: SimulatedEngine) -> None:
    case = replace(REDUCED_TWICE, step=replace(REDUCED_TWICE.step, sync_every=False))
    assert _cause(engine, mistake, case) != ""


@pytest.mark.nightly
def test_a_parameter_that_no_sample_uses_is_left_alone_or_declared(engine: SimulatedEngine) -> None:
    """Half of the first unit, the whole second one and a layer of the root; weight decay shows who updates them."""
    own = inspection.inspect(f"{MODELS}:skipping", f"{MODELS}:batch").own
    sgd = OptimizerSpec(weight_decay=0.5, momentum=0.5)
    case = TrainingCase(
        ModelSpec((), own=own), MeshSpec(2), BatchLayout("contiguous", 2), StepSpec(steps=2, optimizer=sgd), seed=7
    )

    def judged(reference: str) -> list[str]:
        run, causes = Run(engine, reference), []
        execution = run(case, {"grads"})
        for check in (assert_gradients_equal, assert_parameters_equal):
            try:
                check(execution, run.answer(case))
            except Violation as found:
                causes.append(found.cause)
        return causes

    for right in ("fully_shard", "fsdp1", "reference", "reference_fsdp2", "ddp:finding_unused"):
        assert judged(right) == []
    assert judged(f"{TOYS}:after") == judged(f"{TOYS}:zeros_declared") == []
    assert all("ArithmeticRule(unused='zero')" in cause for cause in judged(f"{TOYS}:zeros"))
    assert "declare ArithmeticRule(unused='none')" in judged(f"{TOYS}:none_declared_zeros")[0]
    assert judged("ddp") != []  # without find_unused_parameters it reduces no bucket that waits for one
    ours, left_alone = Run(engine, "reference").answer(case), Run(engine, "fully_shard").answer(case)
    assert ours.leaves_unused
    assert ours.steps[0].used.keys() - left_alone.steps[0].used.keys()


def test_an_eps_in_the_norm_is_right_where_it_is_declared(engine: SimulatedEngine) -> None:
    probe = replace(ANY_SUM, step=StepSpec(clipping="probe", clip_norm=3), arithmetic=Arithmetic(inputs=3))
    for place in ("inside", "outside"):
        run = Run(engine, f"{TOYS}:{place}")
        execution = run(probe, {"norms", "factors"})
        assert_norms_exact(execution, run.answer(probe))
        assert_factors(execution, run.answer(probe))
        wrong = Run(engine, f"{TOYS}:{place}_undeclared")
        for check in (assert_norms_exact, assert_factors):
            with pytest.raises(Violation):
                check(wrong(probe, {"norms", "factors"}), wrong.answer(probe))


def test_rules_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdpcheck.adapters.promises import require_consistent

    adapter, norm = adapters.load("ddp"), NormRule(1e-6)
    wrong: list[dict[str, object]] = [
        {"factor": FactorRule(nested=True, norm=norm)},
        {"global_norm": GlobalNormRule(nested=True, norm=norm)},
        {"arithmetic": ArithmeticRule(dtypes=("float64",))},
        {"accepts": frozenset({"float32", "mean"}), "arithmetic": ArithmeticRule("none")},
        {"arithmetic": ArithmeticRule(dtypes=())},
        {"accepts": frozenset(), "arithmetic": ArithmeticRule(dtypes=("float32",))},
    ]
    for fields in wrong:
        features: Features = replace(adapter.features, **fields)  # type: ignore[arg-type]
        monkeypatch.setattr(adapter, "features", features, raising=False)
        with pytest.raises(AdapterError, match="declares a rule, which it contradicts"):
            require_consistent("ddp", adapter)


def test_a_sum_of_any_kind_is_averaged_once_and_plainly() -> None:
    assert from_json(ANY_SUM.to_json()) == ANY_SUM
    assert "world_factors" not in replace(ANY_SUM, arithmetic=Arithmetic()).to_json()
    for other in (
        {"step": replace(REDUCED_TWICE.step)},
        {"mesh": MeshSpec(1, 3)},
        {"step": StepSpec(clipping="probe")},
    ):
        with pytest.raises(InvalidCase, match="world_factors"):
            replace(ANY_SUM, **other)  # type: ignore[arg-type]


def test_adapters_share_the_proved_answer_where_their_conventions_come_to_the_same(engine: SimulatedEngine) -> None:
    case = replace(ANY_SUM, mesh=MeshSpec(2), step=StepSpec(normaliser=8), arithmetic=Arithmetic())
    answers = [Run(engine, name).answer(case) for name in ("fully_shard", "fsdp1", "reference", "reference_fsdp2")]
    assert not answers[0].leaves_unused
    assert all(answer is answers[0] for answer in answers)
