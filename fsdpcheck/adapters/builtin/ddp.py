"""PyTorch's ``DistributedDataParallel``: whole parameters on every rank, gradients divided by W and then summed."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.adapters.builtin import _torch_sampler
from fsdpcheck.adapters.builtin._torch_common import ACCEPTS, PLAIN_REASONS, local_loss
from fsdpcheck.adapters.capabilities import Sampler, SamplerSetup
from fsdpcheck.adapters.contract import ArithmeticRule, Batch, Features, GlobalNormRule, Setup


class _Trainer:
    """An ordinary DDP training loop, one step at a time."""

    def __init__(self, model: DistributedDataParallel, setup: Setup) -> None:
        self._model, self._setup = model, setup
        self._optimizer = setup.optimizer(model.parameters())
        self._grad_norm: Tensor | None = None

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        last = len(batch.micro_batches) - 1
        for number, micro in enumerate(batch.micro_batches):
            sync = self._setup.step.sync_every or number == last
            with nullcontext() if sync else self._model.no_sync():
                loss = local_loss(self._model, micro, batch, self._setup)
                self._setup.notify("after_forward", self)
                loss.backward()  # type: ignore[no-untyped-call]
        self._setup.notify("after_reduce", self)
        if self._setup.step.max_grad_norm is not None:
            self._grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._setup.step.max_grad_norm)
        self._setup.notify("before_step", self)
        self._optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._model.module.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        named = self._model.module.named_parameters()
        return {name: value.grad.clone() for name, value in named if value.grad is not None}

    def grad_norm(self) -> Tensor:
        assert self._grad_norm is not None, "asked for a gradient norm in a step that does not clip"
        return self._grad_norm


class DistributedDataParallelAdapter:
    """The model as a whole, with the defaults of ``DistributedDataParallel``; units do not matter to it.

    Its reducer multiplies each gradient by 1/W where it copies it into a bucket, and then sums; gradients that are
    reduced after every micro-batch are averaged again with the next one's, which changes nothing but their rounding.
    A bucket that waits for the gradient of a parameter that the forward does not use is never reduced, and the next
    forward raises: for a model with such parameters ``finding_unused`` says ``find_unused_parameters=True``.
    """

    features = Features(
        promises=frozenset({"plain", "global-norm", "epochs", "hooks", "copies"}),
        accepts=ACCEPTS - {"hsdp", "bfloat16"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        global_norm=GlobalNormRule(nested=True, dtype="case", eps=1e-6),
        arithmetic=ArithmeticRule(averaging="before"),
        reasons={
            **PLAIN_REASONS,
            "sharded": "keeps every parameter whole on every rank",
            "padding.zero": "keeps parameters whole: there is no padding",
            "padding.unread": "keeps parameters whole: there is no padding",
            "lifecycle": "keeps parameters whole: nothing is gathered or freed",
            "memory": "keeps parameters whole: nothing is gathered or freed",
            "parameter-hooks": "sets gradients in every backward, reduced or not, and hooks on parameters fire then",
            "interrupts": "has no way back from a backward that raised: its next forward raises too",
            "features": "the features are those of FSDP2",
        },
    )

    def __init__(self, name: str, find_unused: bool = False) -> None:
        self.name, self._find_unused = name, find_unused

    def sampler(self, setup: SamplerSetup) -> Sampler:
        return _torch_sampler.Shares(setup)

    def build(self, model: nn.Module, setup: Setup) -> _Trainer:
        return _Trainer(DistributedDataParallel(model, find_unused_parameters=self._find_unused), setup)


adapter = DistributedDataParallelAdapter("ddp")
finding_unused = DistributedDataParallelAdapter("ddp, finding unused parameters", find_unused=True)
