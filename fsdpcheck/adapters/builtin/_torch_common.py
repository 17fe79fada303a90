"""What the adapters of PyTorch's own implementations share: what they accept and leave out, and the loss of a rank."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, MicroBatch, Setup, Trait

ACCEPTS: frozenset[Trait] = frozenset(
    {
        "bias", "tokens", "sequence", "padding_idx", "layer-norm", "tied", "frozen", "root-parameters",
        "keep-unsharded", "replicated", "ragged", "empty-rank", "wrap-around", "micro-batches", "no-sync", "mean",
        "momentum", "weight-decay", "adamw", "float32", "rows<ranks", "uneven-rows", "project",
        "hsdp", "premultiply", "conv", "group-norm", "rms-norm", "attention", "bags", "surrogates", "real", "adam",
        "schedule", "resume", "layer-norm-without-bias", "own-layers", "bfloat16", "tf32", "fractional-normaliser",
    }
)  # fmt: skip
"""What both shard and train."""

PLAIN_REASONS = {
    "private": "trains plainly: it has no per-sample clipping",
    "exact-factors": "trains plainly: it has no per-sample clipping",
    "deferred": "has no per-sample norms",
    "partial-norms": "has no per-sample norms",
    "dataset-order": "has no per-sample norms",
    "second-backward": "trains plainly: it has no per-sample clipping",
    "bookkeeping": "trains plainly: it has no per-sample clipping",
    "nonfinite": "has no per-sample norms",
    "noise": "trains plainly: it adds none",
    "noise-of-seed": "trains plainly: it adds none",
    "state": "has no checkpoint of its own: what is saved is up to its user",
    "poisson": "has no Poisson sampler",
    "same-draws": "has no Poisson sampler",
    "kernels": "trains plainly: it computes no per-sample norms",
}
"""Why who trains plainly, and leaves saving and sampling to its user, makes no other promise."""


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
