"""What the adapters of PyTorch's own implementations share: the loss a rank sends backward."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from fsdpcheck.adapters._base import Batch, MicroBatch, Setup


def local_loss(model: nn.Module, micro: MicroBatch, batch: Batch, setup: Setup) -> Tensor:
    """0-dim loss of one micro-batch, such that averaging the ranks' gradients gives the released gradient.

    reduction "sum": (W/N) * sum of per-sample losses (1/N when replicated). "mean": the rank's local mean, which
    is FSDP's ordinary contract (one micro-batch, equal local sizes). A micro-batch of no samples gives a zero that
    still has a graph, so that its rank takes part in every collective. In mixed precision the loss is computed from
    outputs cast to the targets' dtype.
    """
    output_BF = model(micro.inputs).to(micro.targets.dtype)
    if setup.step.reduction == "mean":
        return cast(Tensor, cast(Any, setup.loss).with_reduction("mean")(output_BF, micro.targets))
    return cast(Tensor, setup.loss(output_BF, micro.targets).sum() * batch.loss_scale)
