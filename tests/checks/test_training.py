"""Every check passes on a perfect execution and raises on a planted error, however small; bounds are theorems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdpcheck.checks._compare import first_apart
from fsdpcheck.checks.clipping import (
    assert_clipped_gradient_within_bound,
    assert_clipped_update,
    assert_factors,
    assert_global_norm,
    assert_norms_exact,
    assert_probe_coefficients,
)
from fsdpcheck.checks.training import (
    assert_collectives_equal,
    assert_completed,
    assert_deferred_equals_immediate,
    assert_gradients_equal,
    assert_padding_poisoned,
    assert_padding_zero,
    assert_parameters_equal,
    assert_ranks_agree,
    assert_same_execution,
)
from fsdpcheck.errors import AdapterError, NotExact, UsageError
from fsdpcheck.execution import Execution, Failure, RankState
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from fsdpcheck.program import probes
from tests.common.fabricated import (
    CLIPPED,
    EXACT,
    PLAIN,
    PROBE,
    PROBE_NESTED,
    WEIGHT,
    execution,
    right_weights,
    weighted,
    with_gradient,
)
from tests.common.tables import each

ON_ANSWER: dict[Callable[[Execution, Answer], None], Answer] = {
    assert_parameters_equal: EXACT,
    assert_gradients_equal: EXACT,
    assert_norms_exact: EXACT,
    assert_factors: EXACT,
    assert_probe_coefficients: PROBE,
    assert_clipped_gradient_within_bound: PROBE_NESTED,
    assert_global_norm: CLIPPED,
    assert_clipped_update: CLIPPED,
}
MOMENTS = [
    ("after_init", -1),
    *((moment, step) for step in (0, 1) for moment in ("after_reduce", "after_reduce", "before_step", "after_step")),
]
"""Of fabricated.SMALL: those at which something is said of padding."""
ALONE = (assert_completed, assert_ranks_agree, assert_collectives_equal)


@each("check", ON_ANSWER, ids=lambda check: check.__name__)
@each("answer", [PLAIN, EXACT, PROBE, PROBE_NESTED], ids=["plain", "exact", "probe", "nested"])
def test_a_perfect_execution_passes(check: Callable[[Execution, Answer], None], answer: Answer) -> None:
    if check.__name__ in ("assert_global_norm", "assert_clipped_update"):
        answer = CLIPPED
    elif check is assert_probe_coefficients and answer.case.step.clipping != "probe":
        answer = PROBE
    check(execution(answer), answer)


@pytest.mark.parametrize("check", ALONE, ids=lambda check: check.__name__)
def test_a_perfect_execution_passes_alone(check: Callable[[Execution], None]) -> None:
    check(execution(EXACT))


@each("check", [*ON_ANSWER, *ALONE], ids=lambda check: check.__name__)
def test_a_run_that_did_not_complete_is_a_violation_of_every_check(check: Callable[..., None]) -> None:
    answer = ON_ANSWER.get(check, EXACT)
    made = execution(answer)
    made.failure = Failure("deadlock", "rank 1 never called all_gather", (RankState(0, "blocked"),))
    with pytest.raises(Violation, match="rank 1 never called all_gather"):
        check(*((made, answer) if check in ON_ANSWER else (made,)))


def test_missing_steps_and_ranks_are_violations() -> None:
    made = execution(PLAIN)
    made.ranks[2].steps.pop()
    with pytest.raises(Violation, match="got     1 steps"):
        assert_completed(made)
    made = execution(PLAIN)
    made.ranks.pop()
    with pytest.raises(Violation, match="got     2 ranks"):
        assert_completed(made)


@each("value", [math.nan, -math.inf])
@each("field", ["initial", "params", "grads", "norms", "factors", "grad_norm", "saved", "loaded"])
def test_two_runs_of_no_numbers_are_not_equal(field: str, value: float) -> None:
    """NaN equals NaN, so every check that compares what an implementation says with what it says itself would pass."""

    def spoiled() -> Execution:
        made = execution(EXACT)
        for result in made.ranks:
            record = result.steps[-1]
            record.saved, record.loaded = dict(record.params), dict(record.params)
            holder: object = result if field == "initial" else record
            held = getattr(holder, field)
            spoil = {name: torch.full_like(t, value) for name, t in held.items()} if isinstance(held, dict) else None
            setattr(holder, field, torch.full_like(held, value) if spoil is None else spoil)
        return made

    for check in (assert_completed, assert_ranks_agree, assert_collectives_equal):
        with pytest.raises(Violation, match=rf"a reported value is not finite\n  got     {value}") as found:
            check(spoiled())
    assert found.value.where.startswith("rank 0, before the" if field == "initial" else "rank 0, step 1, ")
    for compare in (assert_same_execution, assert_deferred_equals_immediate):
        with pytest.raises(Violation, match="a reported value is not finite"):
            compare(spoiled(), spoiled())


def test_the_smallest_change_of_one_parameter_on_one_rank_is_seen() -> None:
    made = execution(PLAIN)
    value = made.ranks[2].steps[1].params[WEIGHT]
    value[3, 1] = torch.nextafter(value[3, 1], torch.tensor(math.inf, dtype=torch.float64))
    with pytest.raises(Violation, match=rf"step 1, rank 2, {WEIGHT}\[3, 1\]; 1 of 20 elements differ, in 1 of 5"):
        assert_parameters_equal(made, PLAIN)
    with pytest.raises(Violation, match=r"step 1, parameters, rank 2 against rank 0"):
        assert_ranks_agree(made)


@pytest.mark.parametrize("relative", [1e-3, 1e-6, 1e-9, 1e-12])
def test_a_relative_error_of_the_gradient_is_seen(relative: float) -> None:
    made = with_gradient(EXACT, weighted(EXACT, right_weights(EXACT) * (1 + relative)))
    for check in (assert_gradients_equal, assert_parameters_equal):
        with pytest.raises(Violation, match="single device's"):
            check(made, EXACT)


def test_initial_parameters_are_compared_too() -> None:
    made = execution(PLAIN)
    made.ranks[1].initial[WEIGHT] = made.ranks[1].initial[WEIGHT] + 1
    with pytest.raises(Violation, match="before the first step, rank 1"):
        assert_parameters_equal(made, PLAIN)


def test_nan_and_wrong_forms_are_violations_and_zeros_of_either_sign_are_equal() -> None:
    made = execution(PLAIN)
    made.ranks[0].steps[0].params[WEIGHT][0, 0] = math.nan
    with pytest.raises(Violation, match="got     nan"):
        assert_parameters_equal(made, PLAIN)
    made = execution(PLAIN)
    made.ranks[0].steps[0].params[WEIGHT] = made.ranks[0].steps[0].params[WEIGHT].float()
    with pytest.raises(Violation, match=r"got     float32\[5, 4\]"):
        assert_parameters_equal(made, PLAIN)
    made = execution(PLAIN)
    del made.ranks[0].steps[0].params[WEIGHT]
    with pytest.raises(Violation, match=f"missing \\['{WEIGHT}'\\]"):
        assert_parameters_equal(made, PLAIN)
    made = execution(PLAIN)
    for result in made.ranks:
        for value in result.steps[0].params.values():
            value[value == 0] = -0.0
    assert_parameters_equal(made, PLAIN)


def test_what_was_not_recorded_is_a_usage_error_not_a_pass() -> None:
    made = execution(CLIPPED)
    for result in made.ranks:
        for step in result.steps:
            step.grads = step.norms = step.factors = step.grad_norm = None
    for check in (
        assert_gradients_equal, assert_norms_exact, assert_factors, assert_global_norm,
        assert_clipped_update,
    ):  # fmt: skip
        with pytest.raises(UsageError, match="observe"):
            check(made, CLIPPED)


def test_ranks_must_agree_on_gradients_and_global_norms() -> None:
    made = execution(CLIPPED)
    made.ranks[1].steps[0].grad_norm = made.ranks[1].steps[0].grad_norm + 1  # type: ignore[operator]
    with pytest.raises(Violation, match="step 0, rank 1 against rank 0, grad_norm"):
        assert_ranks_agree(made)
    made = execution(CLIPPED)
    assert made.ranks[2].steps[1].grads is not None
    made.ranks[2].steps[1].grads[WEIGHT] += 1
    with pytest.raises(Violation, match="step 1, gradients, rank 2 against rank 0"):
        assert_ranks_agree(made)


def test_padding_must_be_zero_and_seen() -> None:
    made = execution(PLAIN)
    with pytest.raises(
        UsageError, match=r"next: run it with the probe fsdpcheck\.program\.probes\.observables:padding"
    ):
        assert_padding_zero(made)
    for result in made.ranks:
        result.observations = [
            (probes.padding.name, moment, step, {"units.0": torch.zeros(2), "root": torch.zeros(0)})
            for moment, step in MOMENTS
        ]
    assert_padding_zero(made)
    for place, (moment, step) in enumerate(MOMENTS):
        for value in (1e-300, math.nan, 42.0):
            made.ranks[2].observations[place][3]["units.0"] = torch.tensor([0.0, value], dtype=torch.float64)
            with pytest.raises(Violation, match=rf"{moment}, step {step}, rank 2, shard units.0, padding\[1\]"):
                assert_padding_zero(made)
        made.ranks[2].observations[place][3]["units.0"] = torch.zeros(2)


def padding_seen(zero: bool, count: int) -> list[tuple[str, str, int, Any]]:
    """What a probe of padding sees at every moment: ``count`` zeros, or into how many elements it wrote NaN."""
    name, value = (probes.padding.name, {"root": torch.zeros(count)}) if zero else (probes.poison_padding.name, count)
    return [(name, moment, step, value) for moment, step in MOMENTS]


@each("check", [assert_padding_zero, assert_padding_poisoned])
@each("missing", range(9))
def test_padding_must_be_seen_at_every_moment(check: Callable[[Execution], None], missing: int) -> None:
    """In each of two steps of two micro-batches: after each reduction, before and after the optimizer's step."""
    made = execution(PLAIN)
    for result in made.ranks:
        result.observations = padding_seen(check is assert_padding_zero, 1)
    check(made)
    moment, step = MOMENTS[missing]
    del made.ranks[1].observations[missing]
    with pytest.raises(AdapterError, match=f"(?s)announcements of {moment}: .*where   step {step}, rank 1"):
        check(made)


@pytest.mark.parametrize("check", [assert_padding_zero, assert_padding_poisoned])
def test_where_there_is_no_padding_nothing_is_claimed(check: Callable[[Execution], None]) -> None:
    def padded(*elements: int) -> Execution:
        made = execution(PLAIN)
        for result, count in zip(made.ranks, elements, strict=True):
            result.observations = padding_seen(check is assert_padding_zero, count)
        return made

    check(padded(0, 0, 1))
    with pytest.raises(NotExact, match="no rank has padding"):
        check(padded(0, 0, 0))
    with pytest.raises(UsageError, match="next: run it with the probe"):
        check(execution(PLAIN))


def _edited(answer: Answer, kind: str) -> Execution:
    made = execution(answer)
    last = made.ranks[-1]
    assert last.steps[1].norms is not None
    assert last.steps[1].grads is not None
    if kind == "params":
        last.steps[1].params[WEIGHT][0, 0] += 1
    elif kind == "grads":
        last.steps[1].grads[WEIGHT][0, 0] += 1
    elif kind == "norms":
        last.steps[1].norms[0] *= 2
    elif kind == "unrecorded":
        last.steps[1].factors = None
    elif kind == "trace":
        last.trace = last.trace[:-1]
    else:
        made.failure = Failure("raised", "boom")
    return made


@each("kind", ["params", "grads", "norms", "unrecorded", "trace", "failure"])
def test_two_executions_are_the_same_only_if_everything_is(kind: str) -> None:
    assert_same_execution(execution(EXACT), execution(EXACT))
    with pytest.raises(Violation, match="two runs of one case differ"):
        assert_same_execution(execution(EXACT), _edited(EXACT, kind))


@pytest.mark.parametrize("kind", ["params", "grads", "norms", "unrecorded"])
def test_deferred_norms_must_give_the_immediate_bits_but_may_communicate_otherwise(kind: str) -> None:
    assert_deferred_equals_immediate(_edited(EXACT, "trace"), execution(EXACT))
    with pytest.raises(Violation, match="deferred norms are not the immediate ones"):
        assert_deferred_equals_immediate(_edited(EXACT, kind), execution(EXACT))


def test_collectives_must_be_the_same_on_all_members() -> None:
    made = execution(PLAIN)
    made.ranks[1].trace = (made.ranks[1].trace[0], replace(made.ranks[1].trace[1], reduce_op="avg"))
    with pytest.raises(Violation, match=r"group 'world', rank 1 against rank 0, call 1"):
        assert_collectives_equal(made)
    made = execution(PLAIN)
    made.ranks[2].trace = made.ranks[2].trace[:1]
    with pytest.raises(Violation, match="no further call"):
        assert_collectives_equal(made)
    made = execution(PLAIN)
    for rank, subject in ((0, "units.0"), (1, ""), (2, "units.1")):
        made.ranks[rank].trace = tuple(replace(call, subject=subject) for call in made.ranks[rank].trace)
    with pytest.raises(Violation, match="rank 2 against rank 0, call 0"):
        assert_collectives_equal(made)


def test_messages_are_no_collectives() -> None:
    """What rank 0 sends rank 1 receives; that both do is asked by the run, which does not end otherwise."""
    made = execution(PLAIN)
    for rank, op in ((0, "send"), (1, "recv")):
        message = replace(made.ranks[rank].trace[0], op=op, group=(0, 1), tag=0)
        made.ranks[rank].trace = (*made.ranks[rank].trace, message)
    assert_collectives_equal(made)


@pytest.mark.parametrize(
    ("one", "other", "at"), [("abc", "abc", None), ("abc", "axc", 1), ("abc", "ab", 2), ("a", "ab", 1), ("", "", None)]
)
def test_two_sequences_part_at_the_first_difference_or_where_the_shorter_ends(
    one: str, other: str, at: int | None
) -> None:
    assert first_apart(one, other) == at
