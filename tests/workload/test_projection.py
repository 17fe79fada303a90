"""Projection between steps through the optimizers of the harness: the same bits as through ``local_tensors``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdpcheck import strategies
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import comparable
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings import tokens
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program.optimizers import Optimizers
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import optimizer
from fsdpcheck.workload.optimizer import project_

NAMES = ("reference", "reference_fsdp2", "fully_shard", "fsdp1")


HALF_WAY = (
    "v2:AAAAhKvz7tx4-fgd9xKrRsquyGXuIM26hjoGCIgvH8OLd3LysDkZedgIkYfhRTW98rARtjwMrUjw52BgWiHkEEg8kV-WoFR0FLsGI1iMiHK"
    "OEc5gMSRYsBlRXrCZWVgQUbTBquLhVraZklC2GVGxbIM0MFMSS4BlWYluflEKuOGH5GZYtq4FAOfcroM"
)
"""A weight of 1 decays to 1/2 beside a gradient whose terms cancel but for one rounding, and the next step reads it."""


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


def test_one_rounding_decides_no_integer(ranks_here: InProcessEngine) -> None:
    half = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5], dtype=torch.float64)
    told = tokens.decode(HALF_WAY)
    case = replace(told.case, arithmetic=replace(told.case.arithmetic, weights=3))
    beside = [half.clone(), *(torch.nextafter(half, torch.full_like(half, to)) for to in (-9.0, 9.0))]
    project_(beside, case)
    assert beside[0].tolist() == beside[1].tolist() == beside[2].tolist() == [0, 0, 1, -1, 2]
    chapters()[told.law].body(told.case, Run(ranks_here, told.adapter))


def test_norms_behind_a_step_that_went_another_way_are_not_compared(
    ranks_here: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a projection that one rounding does decide."""
    monkeypatch.setattr(optimizer, "TOWARDS_ZERO", 1)
    told = tokens.decode(HALF_WAY)
    run = Run(ranks_here, told.adapter)
    assert [number for number, _ in comparable(run(told.case, {"norms"}), run.answer(told.case))] == [0]
    chapters()[told.law].body(told.case, run)


def test_a_projection_that_is_left_out_is_seen(ranks_here: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizers, "updated", lambda made: [])
    with pytest.raises(Violation, match="the parameters are not the single device's"):
        judged(Run(ranks_here, "tests.engines.adapters_without_local_tensors:reference"), 40)
