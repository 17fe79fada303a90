"""Losses of packed outputs and targets: a case's own kinds, and a user's.

Legend: b samples, F features of the flattened body output, R rows of the instrument, N positions of all samples.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.case import Loss, UserModelSpec
from fsdpcheck.case.training import Across
from fsdpcheck.workload.user_model import loading as user_model
from fsdpcheck.workload.user_model.dtype_widening import widened

Reduction = Literal["none", "mean", "sum"]
_APART = 8
"""Bits between samples that are spread."""


class PerSampleLoss(nn.Module):
    """Per-sample loss [b] of packed outputs and targets [b, F + R], times ``scale``; sums, never means, over features.

    mse: 0.5 * sum e^2; linear: <y, t>; hinge: sum relu(1 - y * sign t); l1: sum |e|; cross_entropy: sum over positions
    of the softmax cross-entropy of ``classes`` logits (F / classes positions), the class being floor |t| modulo
    classes for the position's first target t. And <u, v> for the instrument's targets u and output v. ``reduction`` is
    over samples. ``across``: see ``StepSpec``; the instrument's stay apart.
    """

    def __init__(
        self,
        kind: Loss,
        features: int,
        scale: float = 1.0,
        reduction: Reduction = "none",
        classes: int | None = None,
        across: Across = "nothing",
    ) -> None:
        super().__init__()
        self.kind, self.features, self.scale, self.reduction = kind, features, scale, reduction
        self.classes = features if classes is None else classes
        self.target_features, self.across = features, across

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y_BF, v_BR = outputs[:, : self.features], outputs[:, self.features :]
        t_BF, u_BR = targets[:, : self.target_features], targets[:, self.target_features :]
        y_BF = y_BF + y_BF.roll(1, 0) if self.across == "outputs" else y_BF
        t_BF = t_BF + t_BF.roll(1, 0) if self.across == "targets" else t_BF
        losses_B = (self._body(y_BF, t_BF) + (u_BR * v_BR).sum(1)) * self.scale
        if self.reduction == "none":
            return losses_B
        return losses_B.mean() if self.reduction == "mean" else losses_B.sum()

    def with_reduction(self, reduction: Reduction) -> PerSampleLoss:
        """The same loss, with the same hooks, reduced over samples as asked."""
        other = self._anew(reduction)
        other._forward_hooks = self._forward_hooks
        return other

    def _anew(self, reduction: Reduction) -> PerSampleLoss:
        return PerSampleLoss(self.kind, self.features, self.scale, reduction, self.classes, self.across)

    def _body(self, y_BF: Tensor, t_BF: Tensor) -> Tensor:
        if self.kind == "mse":
            return 0.5 * (y_BF - t_BF).square().sum(1)
        if self.kind == "linear":
            return (y_BF * t_BF).sum(1)
        if self.kind == "hinge":
            return F.relu(1 - y_BF * t_BF.sign()).sum(1)
        if self.kind == "cross_entropy":
            return self._cross_entropy(y_BF, t_BF)
        return (y_BF - t_BF).abs().sum(1)

    def _cross_entropy(self, y_BF: Tensor, t_BF: Tensor) -> Tensor:
        positions = self.features // self.classes
        logits_NC = y_BF.reshape(-1, self.classes)
        chosen_N = (t_BF.reshape(-1, self.classes)[:, 0].abs().floor() % self.classes).long()
        losses_N = F.cross_entropy(logits_NC, chosen_N, reduction="none")
        return losses_N.reshape(len(y_BF), positions).sum(1)


class OwnLoss(PerSampleLoss):
    """The same of a user's own loss: outputs [b, F + R] and targets [b, F' + R], both flattened, go to it as it knows
    them; integer targets as integers.

    ``spread``: whether samples whose targets have an odd sum weigh 2**8 times the others, where they are integers. In a
    few bits each sample's gradient is exact, and the sum of two such ones takes more, so that rounding it shows.
    """

    def __init__(
        self, own: UserModelSpec, scale: float = 1.0, reduction: Reduction = "none", spread: bool = False
    ) -> None:
        super().__init__("mse", own.features, scale, reduction)
        self.own, self.target_features, self.spread = own, own.targets, spread

    def _anew(self, reduction: Reduction) -> OwnLoss:
        return OwnLoss(self.own, self.scale, reduction, self.spread)

    def _body(self, y_BF: Tensor, t_BF: Tensor) -> Tensor:
        shape, dtype = user_model.target_form(self.own)
        targets = t_BF.reshape(len(t_BF), *shape)
        outputs = y_BF.reshape(len(y_BF), *user_model.output_shape(self.own))
        with widened(self.own, y_BF.dtype):
            losses_B: Tensor = user_model.loss(self.own.loss)(outputs, targets if dtype is None else targets.to(dtype))
        if not self.spread or dtype is None:
            return losses_B
        odd_B = t_BF.long().sum(1) & 1
        weights_B: Tensor = (1 + odd_B * (2**_APART - 1)).to(losses_B.dtype)
        return losses_B * weights_B
