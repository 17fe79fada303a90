"""Of a weight of two layers the gradient of one use alone is named; that of both is right, and another is not named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck import diagnosis
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.findings.cause import named
from fsdpcheck.workload import batches, models
from tests.common.later import later

CASE = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(3)), features=3, tied=(0, 1)),
    MeshSpec(2),
    BatchLayout("contiguous", 4),
    StepSpec(normaliser=4),
    Arithmetic("float64", weights=2, inputs=3),
    seed=2,
)
TWICE = replace(CASE, model=ModelSpec((LayerSpec(3, used="twice"), LayerSpec(2)), features=3))
NAME = "tail.linear0.weight"


def by_use(case: TrainingCase) -> tuple[Tensor, Tensor]:
    """Gradients of the two uses, by autograd, with a parameter of its own for each."""
    step, model = later(case).steps[0], models.wide(case)
    model.load_state_dict({name: value.double() for name, value in step.before.items()}, strict=False)
    one, two = model.get_submodule("tail.linear0"), model.get_submodule("tail.linear1")
    assert one.weight is two.weight
    one.weight = nn.Parameter(two.weight.detach().clone())
    targets = batches.targets(case)[list(step.samples)].double()
    packed = torch.cat([targets, torch.zeros_like(step.targets)], dim=1)
    losses = models.loss_for(case)(model(batches.inputs(case)[list(step.samples)].double()), packed)
    (losses.sum() / case.step.normaliser).backward()
    return one.weight.grad, two.weight.grad


@pytest.mark.parametrize(("which", "place"), [("first", 0), ("last", 1)])
def test_one_use_alone_is_named(which: str, place: int) -> None:
    answer = later(CASE)
    uses, right = by_use(CASE), answer.steps[0].used
    assert torch.equal(sum(uses), right[NAME].double()), "the gradient is the sum of both"
    shown = {**right, NAME: uses[place].to(right[NAME].dtype)}
    assert not torch.equal(shown[NAME], right[NAME])
    said = f"of the uses of a tied (shared) weight the {which} alone has a gradient"
    assert named(diagnosis.of_gradient(answer, 0, shown)) == said


def test_a_layer_that_runs_twice_is_two_uses() -> None:
    answer = later(TWICE)
    causes = dict.fromkeys(cause.text for cause, _ in diagnosis.tied_uses.gradients(answer, 0))
    assert [*causes] == [
        f"of the uses of a tied (shared) weight the {which} alone has a gradient" for which in ("first", "last")
    ]


def test_another_gradient_is_not_named_so_and_where_nothing_is_shared_there_is_none() -> None:
    answer = later(CASE)
    right = answer.steps[0].used
    shown = {**right, NAME: right[NAME] + 0.25}
    assert "uses" not in named(diagnosis.of_gradient(answer, 0, shown))
    apart = later(replace(CASE, model=replace(CASE.model, tied=None)))
    assert [*diagnosis.tied_uses.gradients(apart, 0)] == []
