"""Per-sample losses are their definitions, and the instrument reads coefficients off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fsdpcheck.case import LayerSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.workload import models
from fsdpcheck.workload.losses import PerSampleLoss


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_cross_entropy_adds_positions_up_and_reads_classes_off_the_targets(classes: int) -> None:
    y_bTp = torch.arange(3 * 2 * classes, dtype=torch.float64).reshape(3, 2, classes).sin()
    t_bTp = torch.tensor([0.0, -5.5, 3.0, 2.9, -1.0, 7.0], dtype=torch.float64).reshape(3, 2, 1).repeat(1, 1, classes)
    t_bTp[..., 1:] = 99.0
    wanted = [
        sum(
            F.cross_entropy(y_bTp[b, t], torch.tensor(int(abs(t_bTp[b, t, 0].item())) % classes)).item()
            for t in range(2)
        )
        for b in range(3)
    ]
    loss = PerSampleLoss("cross_entropy", 2 * classes, classes=classes)
    packed = [torch.cat([value.flatten(1), torch.zeros(3, 1)], 1) for value in (y_bTp, t_bTp)]
    assert loss(*packed).tolist() == wanted
    assert loss.with_reduction("sum")(*packed).item() == loss(*packed).sum().item()
    case = TrainingCase(ModelSpec((LayerSpec(3), LayerSpec(2)), "sequence", length=4), step=StepSpec("cross_entropy"))
    assert (models.loss_for(case).features, models.loss_for(case).classes) == (8, 2)
    case = replace(case, model=replace(case.model, input="vector"))
    assert (models.loss_for(case).features, models.loss_for(case).classes) == (2, 2)


@pytest.mark.parametrize("kind", ["mse", "linear", "hinge", "l1"])
def test_per_sample_losses_are_their_definitions(kind: str) -> None:
    y, t = [[1.0, -2.0, 0.0], [3.0, 1.0, 2.0]], [[0.0, 2.0, -2.0], [3.0, -1.0, 2.0]]
    v, u = [[5.0], [7.0]], [[2.0], [-1.0]]
    wanted = {
        "mse": [0.5 * (1 + 16 + 4), 0.5 * 4],
        "linear": [-4.0, 12.0],
        "hinge": [1.0 + 3.0 + 1.0, 0.0 + 2.0 + 0.0],
        "l1": [1.0 + 4 + 2, 2.0],
    }[kind]
    outputs, targets = torch.tensor([a + b for a, b in zip(y, v)]), torch.tensor([a + b for a, b in zip(t, u)])  # noqa: B905
    loss = PerSampleLoss(kind, 3, scale=4.0)  # type: ignore[arg-type]
    each = [4 * (wanted[0] + 10), 4 * (wanted[1] - 7)]
    assert loss.reduction == "none"
    assert loss(outputs, targets).tolist() == each
    assert loss.with_reduction("sum")(outputs, targets).item() == sum(each)
    assert loss.with_reduction("mean")(outputs, targets).item() == sum(each) / 2
    assert loss.with_reduction("mean").reduction == "mean"


@pytest.mark.parametrize(("across", "place"), [("outputs", 0), ("targets", 1)])
def test_a_loss_across_samples_takes_two_samples_outputs_or_targets(across: str, place: int) -> None:
    """Another output, or target, of sample 0 changes the loss of sample 1, and of no sample without ``across``."""
    packed = [torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]), torch.tensor([[4.0, 0.0], [1.0, 0.0], [2.0, 0.0]])]
    other = [value.clone() for value in packed]
    other[place][0, 0] = 9.0
    for kind in ("mse", "linear", "l1"):
        loss, alone = PerSampleLoss(kind, 1, across=across), PerSampleLoss(kind, 1)  # type: ignore[arg-type]
        changed = loss.with_reduction("none")(*packed) != loss(*other)
        assert changed.tolist() == [True, True, False]
        assert (alone(*packed) != alone(*other)).tolist() == [True, False, False]
