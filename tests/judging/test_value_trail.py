"""Where a wrong number is seen first: of values as they are noted, of several cases, and of planted faults."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.execution.values import OUTSIDE, Unread, Value
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import origin, value_trail
from fsdpcheck.judging.first_wrong import WEIGHT
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.value_trail import Number, Sought, Trail, common, in_words, of_violation, trail, with_square
from tests.common.laws_by_hand import FakeEngine, a_law

CASE = TrainingCase(ModelSpec((LayerSpec(3),)), MeshSpec(1), BatchLayout("contiguous", 2), StepSpec("l1"))


def value(function: str, *numbers: float, step: int = 0, name: str = "x") -> Value:
    return Value(
        step, f"/lib/{function}.py:7", function, "/lib/caller.py:3 outer", name, numbers, ("/lib/h.py:1 help",)
    )


def execution(*values: Value) -> Execution:
    return Execution("simulated", RunRequest(CASE, "reference"), [RankResult(0, values=[*values])])


def sought(wrong: float, right: float, step: int = 0) -> Sought:
    return Sought(0, step, with_square(wrong), with_square(right))


def seen(found: Trail | None) -> list[str]:
    return [] if found is None else [sight.function for sight in found.wrong]


def test_a_trail_has_the_functions_in_order_and_the_last_right_value_before_them() -> None:
    values = (
        value("adds", 121.0), value("adds", 121.0), value("squares", 16900.0), value("gives", 1.0, 130.0),
        value("later", 121.0), value("gives", 130.0),
    )  # fmt: skip
    found = trail(execution(*values), sought(130.0, 11.0))
    assert seen(found) == ["squares", "gives"]
    assert found is not None
    assert found.right is not None
    assert (found.right.function, found.right.number.of) == ("adds", "the square of it")


def test_what_is_shown_or_of_another_step_is_no_sight() -> None:
    values = value("shown", 130.0, step=OUTSIDE), value("earlier", 130.0, step=0), value("gives", 130.0, step=1)
    assert seen(trail(execution(*values), sought(130.0, 11.0, step=1))) == ["gives"]
    assert seen(trail(execution(*values), sought(130.0, 11.0, step=OUTSIDE))) == ["earlier", "gives"]
    assert trail(execution(*values), sought(131.0, 11.0)) is None


def test_what_a_comprehension_has_its_function_has() -> None:
    assert seen(trail(execution(value("f.<locals>.<listcomp>", 130.0)), sought(130.0, 11.0))) == ["f"]


def test_what_is_sought_as_a_number_of_python_is_in_no_tensor() -> None:
    values = value("losses", 130.3), replace(value("scale", 130.3), is_tensor=False)
    numbers = (Number(130.3),)
    assert seen(trail(execution(*values), Sought(0, 0, numbers, ()))) == ["losses", "scale"]
    assert seen(trail(execution(*values), Sought(0, 0, numbers, (), tensors=False))) == ["scale"]


def found_in(number: float, *functions: str, right: str = "") -> Trail:
    values = [value(right, 1000.5)] if right else []
    got = trail(execution(*values, *(value(one, number) for one in functions)), sought(number, 1000.5))
    assert got is not None
    return got


def test_what_every_case_has_first_is_told() -> None:
    told = common([found_in(130.3, "losses", "sums", "gives"), found_in(99.1, "sums", "gives")])
    assert seen(told) == ["sums", "gives"]
    assert seen(common([found_in(130.3, "losses"), found_in(99.1, "sums")])) == []
    assert common([]) is None


def test_an_ordinary_number_is_told_if_others_of_another_case_are_in_the_same_function() -> None:
    """1.0 in all cases may stand for anything; 2 in one and 3 in another are of what the function does."""
    assert all(Number(value).is_ordinary for value in (0.0, 0.5, -3.0, 33.25, 2.0**39, 19 * 2.0**35))
    assert not any(Number(value).is_ordinary for value in (0.1, 65.0, 2.0**39 + 1, math.inf, math.nan))
    assert common([found_in(1.0, "casts")]) is None
    assert common([found_in(1.0, "casts"), found_in(1.0, "casts")]) is None
    assert seen(common([found_in(2.0, "casts", "sums"), found_in(3.0, "sums")])) == ["sums"]
    assert seen(common([found_in(1.0, "casts"), found_in(130.3, "sums")])) == ["sums"], "one that tells counts alone"


def test_the_last_right_value_is_told_if_all_cases_have_it_there() -> None:
    one, other = found_in(130.3, "sums", right="adds"), found_in(99.1, "sums", right="adds")
    both = common([one, other])
    assert both is not None
    assert both.right is not None
    assert both.right.function == "adds"
    apart = common([one, found_in(99.1, "sums", right="elsewhere")])
    assert apart is not None
    assert apart.right is None


def test_words_name_lines_callers_and_what_was_called() -> None:
    assert in_words(found_in(130.3, "sums", "gives", right="adds")).splitlines() == [
        "the right value is last seen at /lib/adds.py:7 in adds (in x), called at /lib/caller.py:3 in outer",
        "the value that it has is first seen at /lib/sums.py:7 in sums (in x)",
        "behind its calls of help (/lib/h.py:1)",
        "then at /lib/gives.py:7 in gives (in x)",
    ]


@pytest.mark.parametrize(
    ("got", "wanted", "number"),
    [
        ("-1.25", "3.5", -1.25),
        ("0.5", "1.5 within a factor 1 +- 5e-16", 0.5),
        ("0 of 2 marked", "1", None),
        ("the order of epoch 0", "another order", None),
    ],
)
def test_numbers_of_a_violation(got: str, wanted: str, number: float | None) -> None:
    found = of_violation(Violation("is wrong", got=got, wanted=wanted, where="step 1, rank 2, w[0]"))
    assert (None if found is None else found.wrong[0].value) == number
    assert found is None or (found.rank, found.step) == (2, 1)


def test_cases_of_as_many_ranks_are_looked_at_before_others(
    engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank has whole, several have in parts, which have other numbers until they are summed."""
    looked: list[TrainingCase] = []

    def judged(law: Law, run: Run, case: TrainingCase) -> tuple[None, None]:
        looked.append(case)
        return None, None

    monkeypatch.setattr(origin, "_judged", judged)
    long = replace(CASE, step=StepSpec("l1", steps=2, rebuilds=True))
    two = [replace(CASE, mesh=MeshSpec(2), seed=seed) for seed in (1, 2)]
    assert len(long.describe()) > len(two[0].describe())
    failing = [CASE, *two, long, replace(long, seed=3)]
    assert origin.of_cases(chapters()["clipping.norms"], Run(engine, "reference"), failing) == ""
    assert looked == [CASE, long, failing[-1]]


def test_what_a_gradient_is_multiplied_by_is_looked_for_in_further_cases(
    engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is ordinary, unless another case has a third of it in the same function."""

    def of(number: float) -> dict[str, Trail]:
        found = trail(execution(value("shares", number)), Sought(0, 0, (Number(number),), ()))
        assert found is not None
        return {WEIGHT: found, "": found}

    failing = [CASE, *(replace(CASE, seed=seed) for seed in (1, 2, 3, 4))]
    weights = {CASE: of(0.5), failing[3]: of(1 / 3)}
    broken = Violation("wrong", got="1", wanted="2", where="step 0, rank 0")
    monkeypatch.setattr(origin, "_judged", lambda law, run, case: (broken, execution()))
    monkeypatch.setattr(origin, "_trails", lambda run, case, violation, ran: weights.get(case, {}))
    told = origin.of_cases(chapters()["clipping.norms"], Run(engine, "reference"), failing)
    assert told.startswith("the weight of each sample:\nthe value that it has is first seen at /lib/shares.py:7")
    assert origin.of_cases(chapters()["clipping.norms"], Run(engine, "reference"), failing[:3]) == ""


def test_the_function_that_forms_a_wrong_norm_is_told(engine: SimulatedEngine) -> None:
    law = chapters()["clipping.norms"]
    run = Run(engine, "reference", installs=("fsdpcheck.impl.faults:squared_norm_off_by_1e_9",)).watching(law.observe)
    case = replace(CASE, mesh=MeshSpec(2), layout=BatchLayout("contiguous", 5), step=StepSpec(clipping="unclipped"))
    told = origin.of_cases(law, run, [case, replace(case, seed=1)])
    assert "the value that it has is first seen at " in told, told
    assert "impl/faults/precision.py:" in told
    assert "found[..., 0] *= factor (in found, the square of " in told, "the fault's own line"
    assert origin.of_cases(law, replace(run, installs=()), [case]) == "", "the law holds"


def test_a_payload_too_large_to_be_looked_at_is_told(engine: SimulatedEngine) -> None:
    """A wide layer's gradients are not looked at: where its norm is formed is told, and what was left out."""
    law = chapters()["clipping.norms"]
    run = Run(engine, "reference", installs=("fsdpcheck.impl.faults:squared_norm_off_by_1e_9",)).watching(law.observe)
    wide = replace(
        CASE, model=ModelSpec((LayerSpec(3), LayerSpec(100)), features=100), step=StepSpec(clipping="unclipped")
    )
    *_, last = origin.of_cases(law, run, [wide]).splitlines()
    assert last.startswith("not looked at for this: "), last
    assert "of over 256 numbers, the first at " in last


def test_what_a_trail_was_not_looked_for_in_is_worded() -> None:
    assert value_trail.of_unread(Unread()) == ""
    one = value_trail.of_unread(Unread(1, f"{__file__}:1 f", f"{__file__}:2 g"))
    assert one.startswith(f"not looked at for this: one variable of over 256 numbers, the first at {__file__}:1 in f: ")
    assert f"; what came behind 30000 values, at {__file__}:2 in g" in one
    assert "2 variables of over 256 numbers" in value_trail.of_unread(Unread(2, "x.py:1 f"))


def test_of_what_is_raised_the_calls_before_are_told(engine: SimulatedEngine) -> None:
    law = chapters()["clipping.factors"]
    case = TrainingCase(
        ModelSpec((LayerSpec(1, kind="conv", kernel=2, dilation=2),), "signal", 2, 4),
        MeshSpec(1), BatchLayout("contiguous", 1), StepSpec(clipping="probe"),
    )  # fmt: skip
    run = Run(engine, "reference", installs=("tests.mechanisms.planted:dilation_left_out",)).watching(law.observe)
    told = origin.of_cases(law, run, [case])
    first, *others = told.splitlines()
    assert first.startswith("raised at "), told
    assert any("patches (" in line for line in others if line.startswith("behind its calls of ")), told


@pytest.mark.parametrize("numbers", ["0.7", "0.699999988079071"])
def test_what_parameters_hold_before_they_are_read_is_told_as_that(numbers: str) -> None:
    """And no line that happens to have an equal number, as the one where parameters are made, is named."""

    def unread(case: TrainingCase, run: Run) -> None:
        run(case)
        raise Violation("what was loaded is not what was saved", got=numbers, wanted="-1.0", where="rank 0 of 1")

    found = origin.of_cases(a_law(unread), Run(FakeEngine(), "reference"), [CASE])
    assert found == "0.7 is what every parameter holds before a checkpoint is read: nothing was read into this one"
