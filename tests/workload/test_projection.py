"""Projection between steps through the optimizers of the harness: the same bits as through ``local_tensors``."""

from __future__ import annotations

import pytest

from fsdpcheck import strategies
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program.optimizers import Optimizers
from fsdpcheck.strategies import enumeration

NAMES = ("reference", "reference_fsdp2", "fully_shard", "fsdp1")


def judged(run: Run, count: int) -> list[TrainingCase]:
    """Cases of several steps that were compared with the single device's answer."""
    drawn = strategies.cases_of(strategies.PLAIN, run.features, (1, 2, 3)).filter(lambda case: case.step.steps > 1)
    found = []
    for case in enumeration.distinct(drawn, count):
        try:
            answer = run.answer(case)
        except NotExact:
            continue
        assert_parameters_equal(run(case), answer)
        found.append(case)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_without_local_tensors_several_steps_are_the_single_devices(name: str, ranks_here: InProcessEngine) -> None:
    assert len(judged(Run(ranks_here, f"tests.engines.adapters_without_local_tensors:{name}"), 12)) > 8


def test_a_projection_that_is_left_out_is_seen(ranks_here: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizers, "updated", lambda made: [])
    with pytest.raises(Violation, match="the parameters are not the single device's"):
        judged(Run(ranks_here, "tests.engines.adapters_without_local_tensors:reference"), 40)
