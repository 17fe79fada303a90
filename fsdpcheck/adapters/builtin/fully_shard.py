"""PyTorch FSDP2: ``torch.distributed.fsdp.fully_shard``, parameters sharded one by one on their first dimension.

With replicas (dp_replicate > 1) it is HSDP: gradients are reduce-scattered in a replica, then all-reduced over them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.builtin import _torch_sampler
from fsdpcheck.adapters.builtin._fsdp2_features import NO_WAY_BACK, WAY_BACK, Uses, shard
from fsdpcheck.adapters.builtin._gather import full_values, local_tensors
from fsdpcheck.adapters.builtin._torch_common import ACCEPTS, PLAIN_REASONS, local_loss
from fsdpcheck.adapters.capabilities import Sampler, SamplerSetup
from fsdpcheck.adapters.contract import Batch, Features, GlobalNormRule, Promise, Setup

_LIFECYCLE: frozenset[Promise] = frozenset({"hooks", "parameter-hooks", "memory", "copies", *WAY_BACK})
_FEATURES: frozenset[Promise] = frozenset(
    {
        "features.unshard", "features.prefetch", "features.some-sync", "features.late-all-reduce",
        "features.divide-factor", "features.no-gather", "features.checkpointing", "features.meta",
        "features.state-dict", "features.ignored", "features.columns", "features.compiled", "features.bare-root",
        "features.groups-of-two", "features.broadcast",
    }
)  # fmt: skip


class _Trainer:
    """An ordinary FSDP2 training loop, one step at a time."""

    def __init__(self, model: nn.Module, setup: Setup, uses: Uses) -> None:
        self._model, self._setup, self._uses = model, setup, uses
        self._optimizer = setup.optimizer(model.parameters())
        self._grad_norm: Tensor | None = None

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        try:
            self._accumulate(batch)
        except BaseException:
            self._uses.recover()
            raise
        self._setup.notify("after_reduce", self)
        self._clip()
        self._setup.notify("before_step", self)
        self._optimizer.step()
        self._uses.after_step()

    def _accumulate(self, batch: Batch) -> None:
        last = len(batch.micro_batches) - 1
        for number, micro in enumerate(batch.micro_batches):
            self._uses.before_forward(number, last)
            loss = local_loss(self._model, micro, batch, self._setup) * self._uses.loss_factor
            self._setup.notify("after_forward", self)
            loss.backward()  # type: ignore[no-untyped-call]
        self._uses.after_backwards()

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

    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded", "epochs", *_LIFECYCLE, *_FEATURES}),
        accepts=ACCEPTS,
        observables=frozenset({"params", "grads", "grad_norm"}),
        global_norm=GlobalNormRule(nested=True, dtype="case", eps=1e-6),
        reasons={
            **PLAIN_REASONS,
            "padding.zero": "a DTensor hides the padding of its last shard; it has no public view of it",
            "padding.unread": "a DTensor hides the padding of its last shard; it has no public view of it",
            "lifecycle": "gathers the next unit ahead, and has no public view of what is gathered",
            **NO_WAY_BACK,
        },
    )

    def __init__(self, name: str = "fully_shard", by_the_book: bool = False) -> None:
        self.name, self._by_the_book = name, by_the_book

    def sampler(self, setup: SamplerSetup) -> Sampler:
        return _torch_sampler.Shares(setup)

    def build(self, model: nn.Module, setup: Setup) -> _Trainer:
        return _Trainer(model, setup, shard(model, setup, self._by_the_book))


adapter = FullyShard()
by_the_book = FullyShard("fully_shard, recovering as documented", by_the_book=True)
"""A known finding: ``reset_iter_state`` of torch 2.13 says that it drops the gradients of micro-batches that were not
reduced, and keeps them."""
