"""Options of groups of parameters that are lost are named; groups that are wrong otherwise are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdpcheck import diagnosis
from fsdpcheck.case import OptimizerSpec
from fsdpcheck.diagnosis.other_updates import after
from fsdpcheck.findings.cause import named
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload.optimizer import make_optimizer
from tests.common.fabricated import SMALL
from tests.common.later import later


def _answer(optimizer: OptimizerSpec) -> Answer:
    return later(replace(SMALL, step=replace(SMALL.step, optimizer=optimizer)))


def _of_one_group(answer: Answer, **options: float) -> Named:
    """Parameters after step 0 of an optimizer that never had groups, with these options."""
    step = answer.steps[0]
    parameters = {name: nn.Parameter(step.before[name].clone()) for name in answer.trainable}
    optimizer = make_optimizer(replace(answer.case.step.optimizer, groups="one"), parameters.values())
    optimizer.param_groups[0].update(options)
    for name, parameter in parameters.items():
        parameter.grad = step.used[name].clone()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("groups", ["vectors apart", "last unit apart"])
def test_the_options_of_groups_that_are_lost_are_named(kind: str, groups: str) -> None:
    answer = _answer(OptimizerSpec(kind, weight_decay=0.5, groups=groups))  # type: ignore[arg-type]
    said = named(diagnosis.of_update(answer, 0, _of_one_group(answer)))
    assert (
        said == "the optimizer's groups are lost: every parameter has the learning rate and weight decay of the first"
    )
    assert "groups" not in named(diagnosis.of_update(answer, 0, _of_one_group(answer, lr=4.0)))


def test_a_single_group_loses_nothing() -> None:
    answer = _answer(OptimizerSpec(weight_decay=0.5))
    assert "groups" not in named(diagnosis.of_update(answer, 0, _of_one_group(answer, weight_decay=0.0)))


def test_an_optimizer_that_nothing_happens_to_gives_the_right_parameters() -> None:
    answer = _answer(OptimizerSpec("adamw", weight_decay=0.5, groups="vectors apart"))
    for step, own in enumerate(answer.steps):
        assert all(torch.equal(v, own.after[name]) for name, v in after(answer, step, lambda *_: None).items())
