"""An ordinary training loop over a model that was made parallel: all that most adapters need besides ``build``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdpcheck.adapters.contract import Batch, MicroBatch, Part, Setup, Trait
from fsdpcheck.case.axes import AXES, Axis

ORDINARY: Final[frozenset[Trait]] = frozenset(
    {
        "bias", "tokens", "sequence", "padding_idx", "layer-norm", "tied", "frozen", "root-parameters",
        "keep-unsharded", "replicated", "ragged", "empty-rank", "wrap-around", "micro-batches", "no-sync", "mean",
        "momentum", "weight-decay", "adamw", "float32", "rows<ranks", "uneven-rows", "project",
        "hsdp", "premultiply", "conv", "group-norm", "rms-norm", "attention", "bags", "surrogates", "real", "adam",
        "schedule", "resume", "layer-norm-without-bias", "own-layers", "bfloat16", "tf32", "fractional-normaliser",
        "reused", "evaluation", "inference-mode", "rebuilt", "parameter-groups", "one-row",
    }
)  # fmt: skip
"""Traits of cases that ask for nothing but torch's own layers, losses and optimizers."""

PLAIN_REASONS: Final[Mapping[str, str]] = {
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
    "resharded": "has no checkpoint of its own: what is saved is up to its user",
    "readable": "has no checkpoint of its own: what is saved is up to its user",
    "stored": "has no checkpoint of its own: what is saved is up to its user",
    "across-samples": "trains plainly: it has no per-sample clipping",
    "accounted": "trains plainly: there is nothing to account for",
    "engine": "trains plainly: there is nothing to account for",
    "poisson": "has no Poisson sampler",
    "same-draws": "has no Poisson sampler",
    "kernels": "trains plainly: it computes no per-sample norms",
    "copies": "shows what it trains, as it lies: it is copied where it is taken",
}
"""Why who trains plainly, and leaves saving and sampling to its user, makes no other promise."""


def mesh_of(setup: Setup, *always: Axis) -> DeviceMesh:
    """A DeviceMesh of all ranks with the case's axes by their names, outermost first.

    It has the axes of several ranks and those of ``always``; of one rank alone at least "dp_shard".
    """
    sizes = setup.mesh.sizes
    names = [axis for axis in AXES if axis in sizes or axis in always] or ["dp_shard"]
    return init_device_mesh(setup.device.type, tuple(sizes.get(axis, 1) for axis in names), mesh_dim_names=tuple(names))


def local_loss(model: nn.Module, micro: MicroBatch, batch: Batch, setup: Setup) -> Tensor:
    """0-dim loss of one micro-batch, such that averaging the ranks' gradients gives the released gradient.

    reduction "sum": ``batch.loss_scale`` * sum of per-sample losses. "mean": the rank's local mean, which is FSDP's
    ordinary contract (one micro-batch, equal local sizes). A micro-batch of no samples gives a zero that still has a
    graph, so that its rank takes part in every collective. In mixed precision the loss is computed from outputs cast to
    the targets' dtype.
    """
    output_BF = model(micro.inputs).to(micro.targets.dtype)
    if setup.step.reduction == "mean":
        return cast(Tensor, cast(Any, setup.loss).with_reduction("mean")(output_BF, micro.targets))
    return cast(Tensor, setup.loss(output_BF, micro.targets).sum() * batch.loss_scale)


def synchronizing(model: Any, reduces: bool) -> AbstractContextManager[object]:
    """Around a micro-batch of whose gradients ``model`` reduces all at once, or none (``reduces``), if it has a way."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(reduces)
    elif hasattr(model, "no_sync") and not reduces:
        return cast(AbstractContextManager[object], model.no_sync())
    return nullcontext()


class TrainingLoop:
    """The trainer of a model that reduces its own gradients: forward, backward, clip, step.

    ``model``: what is called. ``named``: the module whose ``named_parameters()`` are the canonical ones, of which
    values and gradients are shown, ``model`` itself if None. ``optimizer``: ``Setup.optimizer`` of its parameters if
    None, of nothing that is trained where it has none, as a stage without layers. Where an implementation does one of
    these its own way, override that method.
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        named: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model, self.setup = model, setup
        self.named = named if named is not None else model
        given = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]  # torch's optimizers take no empty list
        self.optimizer = optimizer if optimizer is not None else setup.optimizer(given)
        self._grad_norm: Tensor | None = None

    def step(self, batch: Batch) -> None:
        """See ``Trainer.step``."""
        self.optimizer.zero_grad()
        self.accumulate(batch)
        self.setup.notify("after_reduce", self)
        if self.setup.step.max_grad_norm is not None:
            self._grad_norm = whole(self.clip(self.setup.step.max_grad_norm))
        self.setup.notify("before_step", self)
        self.optimizer.step()

    def accumulate(self, batch: Batch) -> None:
        """Forward and backward of all micro-batches."""
        last = len(batch.micro_batches) - 1
        for number, micro in enumerate(batch.micro_batches):
            with self.reducing(number, last):
                loss = self.loss(micro, batch)
                self.setup.notify("after_forward", self)
                self.backward(loss)

    def reduces(self, number: int, last: int) -> bool:
        """Whether the gradients of micro-batch ``number`` of 0 .. ``last`` are to be reduced over ranks at once."""
        return self.setup.step.sync_every or number == last

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        """Around the forward and backward of a micro-batch: what makes it reduce, or not (see ``reduces``).

        By what the model has for it, ``set_requires_gradient_sync`` of FSDP2 or ``no_sync`` of DDP and FSDP1.
        """
        return synchronizing(self.model, self.reduces(number, last))

    def loss(self, micro: MicroBatch, batch: Batch) -> Tensor:
        """What ``backward`` is called on."""
        return local_loss(self.model, micro, batch, self.setup)

    def backward(self, loss: Tensor) -> None:
        """Backward of a micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, limit: float) -> Tensor:
        """Clip by the global gradient norm, and return it."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def evaluate(self, inputs: Tensor) -> Tensor:
        """See ``Observed.evaluate``."""
        self.model.eval()
        with torch.no_grad():
            outputs: Tensor = self.model(inputs)
        self.model.train()
        return outputs

    def thaw(self) -> None:
        """See ``Observed.thaw``. What ``fully_shard`` keeps gathered is freed before, see ``fully_shard:thawing``."""
        self._free()
        self.model.requires_grad_()

    def freeze(self, names: Collection[str]) -> None:
        """See ``Observed.freeze``."""
        self._free()
        for name, parameter in self.named.named_parameters():
            if name in names:
                parameter.requires_grad_(False)

    def _free(self) -> None:
        for module in self.model.modules():
            if callable(reshard := getattr(module, "reshard", None)):
                reshard()

    def parameters(self) -> Mapping[str, Tensor | Part]:
        """See ``Trainer.parameters``."""
        return dict(self.named.named_parameters())

    def gradients(self) -> Mapping[str, Tensor | Part | None]:
        """See ``Observed.gradients``."""
        return {name: parameter.grad for name, parameter in self.named.named_parameters()}

    def grad_norm(self) -> Tensor:
        """See ``Observed.grad_norm``."""
        assert self._grad_norm is not None, "asked for a gradient norm in a step that does not clip"
        return self._grad_norm

    def local_tensors(self) -> list[Tensor]:
        """See ``Observed.local_tensors``: the parameters of ``named``, or what the optimizer trains in their place."""
        trained = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [local(parameter) for parameter in [*self.named.parameters()] or trained]


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, by a collective; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, live and detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
