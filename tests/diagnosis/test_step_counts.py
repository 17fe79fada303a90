"""Adam's bias correction by another count of steps is named; another wrong update is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdpcheck import diagnosis
from fsdpcheck.case import LayerSpec, OptimizerSpec
from fsdpcheck.diagnosis.step_counts import _with_count
from fsdpcheck.findings.cause import named
from tests.common.fabricated import SMALL
from tests.common.later import later

ADAM = replace(SMALL.step, steps=3, optimizer=OptimizerSpec("adam", weight_decay=0.5), micro_batches=1)
ROUTED = replace(SMALL.model, layers=(LayerSpec(4, used="routed"), *SMALL.model.layers), units=(2, 1))
ANSWER = later(replace(SMALL, step=ADAM, model=ROUTED, arithmetic=replace(SMALL.arithmetic, project=True)))
NAME = "units.0.linear1.weight"


@pytest.mark.parametrize("count", [1, 2])
def test_another_count_of_steps_is_named_where_a_rank_has_a_part_of_the_parameter_too(count: int) -> None:
    right = ANSWER.steps[2].after
    wrong = _with_count(ANSWER, 2, [NAME], count)[NAME]
    assert bool((wrong != right[NAME]).any())
    part = right[NAME].clone()
    part[:2] = wrong[:2]
    for shown in (wrong, part):
        said = named(diagnosis.of_update(ANSWER, 2, {**right, NAME: shown}))
        assert said == f"Adam's bias correction of {NAME} counts {count} steps, a single device's counts 3"


def test_the_right_count_gives_the_right_parameters_and_what_is_only_wrong_is_not_named() -> None:
    right = ANSWER.steps[2].after
    assert torch.equal(_with_count(ANSWER, 2, [NAME], 3)[NAME], right[NAME])
    assert "counts" not in named(diagnosis.of_update(ANSWER, 2, {**right, NAME: right[NAME] + 0.125}))
