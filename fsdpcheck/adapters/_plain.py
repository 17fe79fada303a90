"""What the adapters of torch's own implementations share: the local loss of a micro-batch, and who shares parameters.

Shapes: b samples of a micro-batch, F body outputs, R rows of the instrument.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fsdpcheck.adapters._base import Batch, MicroBatch, Setup


def local_loss(model: nn.Module, micro: MicroBatch, batch: Batch, setup: Setup) -> Tensor:
    """0-dim loss of one micro-batch, such that averaging the ranks' gradients gives the released gradient.

    reduction "sum": (W/N) * sum of per-sample losses (1/N when replicated). "mean": the rank's local mean, which over
    several micro-batches is sum_k (b_k / b) * mean_k. A micro-batch of no samples is a zero that still has a graph, so
    that the rank takes part in every collective.
    """
    output_bF = model(micro.inputs)
    if setup.step.reduction == "mean" and micro.indices:
        share = len(micro.indices) / batch.size
        mean: Tensor = setup.loss.with_reduction("mean")(output_bF, micro.targets)  # type: ignore[operator]
        return mean * share
    total: Tensor = setup.loss(output_bF, micro.targets).sum()
    return total * batch.loss_scale


def units_apart(model: nn.Module, units: Iterable[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], set[str]]:
    """Split ``units`` into those that own their parameters alone, and the names of modules that share some with others.

    PyTorch asks for shared parameters to be in one sharding unit ("shared parameters must be wrapped in the same FSDP
    instance", torch.distributed.fsdp.wrap), the root being one: sharding two owners apart unties them silently.
    """
    alone: list[tuple[str, ...]] = []
    sharing: set[str] = set()
    for names in units:
        own = {id(parameter) for name in names for parameter in model.get_submodule(name).parameters()}
        if own & _ids_outside(model, names):
            sharing.update(names)
        else:
            alone.append(names)
    return alone, sharing


def _ids_outside(model: nn.Module, names: tuple[str, ...]) -> set[int]:
    """Identities of the parameters used by a module outside the named ones."""
    found = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{inner}.") for inner in names):
            found.add(id(parameter))
    return found
