"""PyTorch FSDP2: ``torch.distributed.fsdp.fully_shard``, parameters sharded one by one on their first dimension.

With replicas (dp_replicate > 1) it is HSDP: gradients are reduce-scattered in a replica, then all-reduced over them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdpcheck.adapters import _torch_sampler
from fsdpcheck.adapters._base import Batch, Features, GlobalNormRule, Setup, Trait
from fsdpcheck.adapters._gather import full_values, local_tensors
from fsdpcheck.adapters._mesh import mesh_of
from fsdpcheck.adapters._plain import local_loss
from fsdpcheck.adapters._plugs import Sampler, SamplerSetup

_ACCEPTS: frozenset[Trait] = frozenset(
    {
        "bias", "tokens", "sequence", "padding_idx", "layer-norm", "tied", "frozen", "root-parameters",
        "keep-unsharded", "replicated", "ragged", "empty-rank", "wrap-around", "micro-batches", "no-sync", "mean",
        "momentum", "weight-decay", "adamw", "float32", "rows<ranks", "uneven-rows", "project",
        "hsdp", "premultiply", "conv", "group-norm", "rms-norm", "attention", "bags", "surrogates", "real", "adam",
        "schedule", "resume", "layer-norm-without-bias", "own-layers",
    }
)  # fmt: skip


class _Trainer:
    """An ordinary FSDP2 training loop, one step at a time."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        assert isinstance(model, FSDPModule)
        self._model, self._setup = model, setup
        self._optimizer = setup.optimizer(model.parameters())
        self._grad_norm: Tensor | None = None

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        last = len(batch.micro_batches) - 1
        for number, micro in enumerate(batch.micro_batches):
            self._model.set_requires_gradient_sync(self._setup.step.sync_every or number == last)
            loss = local_loss(self._model, micro, batch, self._setup)
            self._setup.notify("after_forward", self)
            loss.backward()  # type: ignore[no-untyped-call]
        self._setup.notify("after_reduce", self)
        self._clip()
        self._setup.notify("before_step", self)
        self._optimizer.step()

    def _clip(self) -> None:
        limit = self._setup.step.max_grad_norm
        if limit is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit)
            self._grad_norm = full_values({"norm": norm})["norm"]

    def parameters(self) -> dict[str, Tensor]:
        return full_values(dict(self._model.named_parameters()))

    def gradients(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return full_values({name: parameter.grad for name, parameter in named if parameter.grad is not None})

    def grad_norm(self) -> Tensor:
        assert self._grad_norm is not None, "asked for a gradient norm in a step that does not clip"
        return self._grad_norm

    def local_tensors(self) -> list[Tensor]:
        return local_tensors(self._model.parameters())


class FullyShard:
    """Each unit by ``fully_shard``, then the root. Tied layers must be in one unit: sharding them apart unties them."""

    name = "fully_shard"
    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded", "epochs"}),
        accepts=_ACCEPTS,
        observables=frozenset({"params", "grads", "grad_norm"}),
        global_norm=GlobalNormRule(nested=True, dtype="case", eps=1e-6),
        reasons={
            "private": "trains plainly: it has no per-sample clipping",
            "exact-factors": "trains plainly: it has no per-sample clipping",
            "padding.zero": "a DTensor hides the padding of its last shard; it has no public view of it",
            "padding.unread": "a DTensor hides the padding of its last shard; it has no public view of it",
            "deferred": "has no per-sample norms",
            "partial-norms": "has no per-sample norms",
            "dataset-order": "has no per-sample norms",
            "second-backward": "trains plainly: it has no per-sample clipping",
            "nonfinite": "has no per-sample norms",
            "noise": "trains plainly: it adds none",
            "state": "has no checkpoint of its own: what is saved is up to its user",
            "poisson": "has no Poisson sampler",
            "same-draws": "has no Poisson sampler",
            "kernels": "trains plainly: it computes no per-sample norms",
            "lifecycle": "gathers the next unit ahead, and has no public view of what is gathered",
        },
    )

    def sampler(self, setup: SamplerSetup) -> Sampler:
        return _torch_sampler.Shares(setup)

    def build(self, model: nn.Module, setup: Setup) -> _Trainer:
        mesh = mesh_of(setup)
        reshard = setup.mesh.reshard_after_forward
        for names in setup.units:
            modules = [model.get_submodule(name) for name in names]
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return _Trainer(model, setup)


adapter = FullyShard()
