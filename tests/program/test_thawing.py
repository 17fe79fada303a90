"""What is thawed between two steps is thawed in a trainer that goes on from a checkpoint too, and frozen again."""

from __future__ import annotations

import pytest

from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run


@pytest.mark.parametrize("refreezes", [False, True])
@pytest.mark.parametrize("law", ["training.plain", "state.resumed"])
def test_a_training_that_thaws_goes_on_behind_each_stop(law: str, refreezes: bool, engine: SimulatedEngine) -> None:
    step = StepSpec(
        steps=4, normaliser=2, optimizer=OptimizerSpec("sgd", momentum=0.5), thaws=True, refreezes=refreezes
    )
    case = TrainingCase(
        ModelSpec((LayerSpec(3, bias=True, frozen="all"), LayerSpec(2))),
        MeshSpec(1),
        BatchLayout("contiguous", 2),
        step,
        Arithmetic(project=True),
        seed=3,
    )
    verdict = check_case(chapters()[law], Run(engine, "tests.toys.thawed_savers:adapter"), case, diagnose=False)
    assert verdict.status == "holds", verdict
