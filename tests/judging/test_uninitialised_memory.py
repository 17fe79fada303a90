"""A finding of memory that nobody has written says so, and which line asked for that memory; no other finding does."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.violation import Violation
from fsdpcheck.impl import faults
from fsdpcheck.judging import uninitialised_memory
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from tests.common.laws_by_hand import FakeEngine, a_case, a_law

TWO_RANKS = TrainingCase(ModelSpec((LayerSpec(3, bias=True),), features=2), MeshSpec(2), BatchLayout("contiguous", 2))
CLIPPED = replace(TWO_RANKS, step=StepSpec(max_grad_norm=1.0))


def _violation(got: str) -> Violation:
    return Violation("wrong", got=got, wanted="1", where="rank 0")


@pytest.mark.parametrize(
    ("fault", "law", "case"),
    [
        ("norm_over_an_unwritten_tail", "global-norm.returned", CLIPPED),
        ("gradients_added_to_unwritten_memory", "training.plain", TWO_RANKS),
    ],
)
def test_the_cause_names_the_line_that_asked_for_the_memory(
    fault: str, law: str, case: TrainingCase, engine: SimulatedEngine
) -> None:
    run = Run(engine, "reference", installs=(f"fsdpcheck.impl.faults:{fault}",)).watching(chapters()[law].observe)
    verdict = check_case(chapters()[law], run, case, diagnose=False)
    assert verdict.finding is not None
    with pytest.raises(Violation) as caught:
        chapters()[law].body(case, run)
    cause = uninitialised_memory.cause(chapters()[law], run, case, caught.value)
    assert re.search(faults.ALL[fault].cause, cause), cause
    assert cause.endswith("is read before it is written; with zeros there the law holds")


def test_a_mistake_that_memory_has_no_part_in_is_left_to_others(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference", installs=("fsdpcheck.impl.faults:global_norm_of_own_shard",))
    law = chapters()["global-norm.returned"]
    with pytest.raises(Violation) as caught:
        law.body(CLIPPED, run.watching(law.observe))
    assert uninitialised_memory.cause(law, run.watching(law.observe), CLIPPED, caught.value) == ""


def test_what_comes_and_goes_by_itself_is_not_said_to_come_from_memory() -> None:
    count = itertools.count()

    def body(case: TrainingCase, run: Run) -> None:
        raise _violation(str(next(count)))

    assert (
        uninitialised_memory.cause(a_law(body), Run(FakeEngine(), "fully_shard"), a_case(1, 1), _violation("7")) == ""
    )


def test_a_law_that_breaks_with_zeros_too_is_told_with_both_numbers() -> None:
    def body(case: TrainingCase, run: Run) -> None:
        raise _violation("0.5" if run.memory == "zeros" else "nan")

    told = uninitialised_memory.cause(a_law(body), Run(FakeEngine(), "fully_shard"), a_case(1, 1), _violation("nan"))
    assert told.endswith("is read before it is written; with zeros there the law breaks too: got 0.5, wanted 1")


def test_the_line_is_named_too_where_a_second_mistake_breaks_the_law_with_zeros(engine: SimulatedEngine) -> None:
    installs = tuple(
        f"fsdpcheck.impl.faults:{name}" for name in ("gradients_added_to_unwritten_memory", "summed_not_averaged")
    )
    law = chapters()["training.plain"]
    run = Run(engine, "reference", installs=installs).watching(law.observe)
    with pytest.raises(Violation) as caught:
        law.body(TWO_RANKS, run)
    cause = uninitialised_memory.cause(law, run, TWO_RANKS, caught.value)
    assert re.search(r"what \S+\.py:\d+ got from torch.empty", cause), cause
    assert "with zeros there the law breaks too: got " in cause
    assert ", wanted " in cause
