"""Whatever case a wrong number is met in, looking for its cause ends: what it cannot explain it leaves unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pytest
from torch import Tensor

from fsdpcheck import diagnosis
from fsdpcheck.adapters.builtin.reference import Reference
from fsdpcheck.case import TrainingCase, Trait
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.cause import Causes
from fsdpcheck.judging.drawing import Batch
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import Answer
from fsdpcheck.strategies import cases_of


def _changed(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 0.5 ** (number > 0) for number, (name, value) in enumerate(values.items())}


def _looked_for(answer: Answer, step: int) -> list[Causes | None]:
    """Causes of numbers that are wrong, each by more than rounding."""
    wanted = answer.steps[step]
    found = [
        diagnosis.of_gradient(answer, step, _changed(wanted.used)),
        diagnosis.of_update(answer, step, {**wanted.before, **_changed(wanted.after)}),
        diagnosis.of_update(answer, step, dict(wanted.before)),
        diagnosis.of_initial(answer, _changed(wanted.before)),
    ]
    if answer.case.step.private and wanted.samples:
        for rank, mine in enumerate(diagnosis.rows(answer.case, step, wanted)):
            found.append(diagnosis.of_norms(answer, step, rank, wanted.norms[mine] * 1.5 + 1))
            found.append(diagnosis.of_factors(answer, step, rank, wanted.factors[mine] * 0.5 + 0.125))
    return found


@pytest.mark.parametrize(
    ("law", "met"),
    [("training.plain", "frozen"), ("clipping.norms", "tied-private"), ("clipping.one-row", "one-row-private")],
)
def test_a_cause_is_looked_for_in_whatever_is_drawn(law: str, met: Trait) -> None:
    run, demanded = Run(SimulatedEngine(), "reference"), set[Trait]()
    drawn = Batch(cases_of(chapters()[law].space, Reference.features, (1, 2, 3)), 60, 1, 8).draw().cases[:8]
    for case in drawn:
        assert isinstance(case, TrainingCase)
        with suppress(NotExact):
            answer = run.answer(case)
            assert all(len(_looked_for(answer, step)) >= 4 for step in range(len(answer.steps)))
            demanded |= case.requires()
    assert met in demanded
