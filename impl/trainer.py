"""Trainer: one training step, plain or with per-sample clipping, over a sharded model.

Every step does, in order: forward and backward of each micro-batch, reduction, global clipping or noise, the
optimizer's update. How a private step clips is in clipping/private_backward.py.

Loss convention: the released gradient is (1/N) * sum over the logical batch. Reductions average over the W ranks, so a
rank weighs each of its samples W/N when the batch is distributed and 1/N when it is replicated (in general S/N, with S
parts of the batch); this is right whatever the local sizes are.

Source: Li et al. 2021, arXiv:2110.05679 (two passes); Zhao et al. 2023, arXiv:2304.11277 (sharding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .accounting import Ledger
from .clipping import clip_factors, norm_aggregation
from .clipping.batch_layout import DISTRIBUTED, Layouts
from .clipping.private_backward import Norms, Privacy, PrivateBackward
from .costs.profile import OFF, Off, Profile
from .sharding import collectives
from .sharding.protocol import Sharded

MICRO_BATCHES = collectives.Subject("(numbers of micro-batches)")
Moment = Literal["after_forward", "after_first_backward", "after_norms", "after_reduce", "before_step", "after_reshard"]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class MicroBatch:
    """``inputs`` and ``targets``, sample axis first, b >= 0 rows; ``indices``: their global sample numbers."""

    inputs: Tensor
    targets: Tensor
    indices: Sequence[int]


@dataclass(frozen=True)
class Options:
    """How steps are taken.

    ``normaliser`` is N. ``privacy`` clips each sample's gradient (None: plain). ``max_grad_norm`` clips the global norm
    of a plain step. ``sync_every`` reduces after each micro-batch instead of after the last. ``layout``: which ranks
    are given the same samples. ``rate``: with which probability a record joins a step, for the accounts alone.
    ``unequal_micro_batches``: ranks may have unequal numbers of micro-batches, as where an epoch ends; one number more
    is exchanged a step, and who has fewer goes through empty ones. Without it each rank must have as many.
    """

    normaliser: float
    layout: Layouts = DISTRIBUTED
    privacy: Privacy | None = None
    max_grad_norm: float | None = None
    sync_every: bool = True
    rate: float = 1.0
    unequal_micro_batches: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.normaliser < math.inf:
            raise ValueError(
                f"got Options.normaliser {self.normaliser}, wanted a positive finite number: what the sum over the"
                " logical batch is divided by"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"got Options.max_grad_norm {self.max_grad_norm}, wanted a positive number, None for no clipping, or"
                " inf to have the norm and clip nothing"
            )


class Trainer:
    """Trains a sharded ``model``. ``loss(outputs, targets)`` gives per-sample losses [b].

    All ranks construct it with equal values, and call each method together, with equally many micro-batches each (of
    zero rows where a rank has no samples) unless ``Options.unequal_micro_batches``. ``notify`` is called at the moments
    named above. Over the model's replicas (HSDP) each rank has samples of its own unless ``Options.layout`` says
    otherwise.
    """

    def __init__(
        self,
        model: Sharded,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: OptimizerFactory,
        options: Options,
        *,
        notify: Callable[[Moment], None] = lambda moment: None,
        profile: Profile | Off = OFF,
    ) -> None:
        self.model, self.options, self.loss, self.notify, self.profile = model, options, loss, notify, profile
        self.private: PrivateBackward | None = None
        if options.privacy is not None:
            if options.privacy.fuse_norms and options.sync_every:
                raise ValueError("fuse_norms weighs no micro-batch before the last: reduce once, with sync_every=False")
            try:
                self.private = PrivateBackward(model, options.privacy, options.layout.shards, notify, profile)
            except NotImplementedError as error:
                error.add_note(self._where)
                raise
        self.grad_norm: Tensor | None = None
        """0-dim: the global gradient norm that the last step clipped by."""
        self.ledger = Ledger()
        """What an accountant is to be told of the private steps so far."""
        shards = self.model.shards()
        self.optimizer = optimizer(shards) if shards else None

    @property
    def steps_taken(self) -> int:
        """The step that the next noise belongs to. It is the model's, and is saved and loaded with its parameters."""
        return self.model.steps_taken

    @property
    def _where(self) -> str:
        """This rank's number over both axes, as torch numbers those of a mesh (replicas, shards), for errors."""
        axis, replicas = self.model.axis, self.model.replicas
        return f"on rank {replicas.rank * axis.size + axis.rank} of {axis.size * replicas.size}"

    @property
    def found(self) -> Norms:
        """Norms and factors of the last step's samples on this rank. Raises AttributeError in plain training."""
        if self.private is None:
            raise AttributeError("no per-sample norms: Options.privacy is None")
        return self.private.found

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """One optimizer step on this rank's share of the logical batch.

        If it raises, what it has gathered and computed is dropped, and the parameters are as they were.
        """
        if not micro_batches:
            raise ValueError("no micro-batch: a rank without samples passes micro-batches of zero rows like the others")
        self.model.zero_grad()
        self.grad_norm = None
        try:
            self.accumulate(self.as_many_everywhere(micro_batches))
        except BaseException as error:
            self.abandon()
            error.add_note(self._where)
            raise
        if self.options.max_grad_norm is not None:
            self.grad_norm = clip_factors.clip_global_norm(self.model, self.options.max_grad_norm)
        if self.private is not None:
            with self.profile.part("noise"):
                self.private.add_noise(self.steps_taken, self.options.normaliser)
        self.notify("before_step")
        with self.profile.part("update"):
            self.update()
        self.account()
        self.model.steps_taken += 1

    def account(self) -> None:
        """Write a private step down, once it is taken."""
        if self.private is not None:
            self.ledger.add(self.private.privacy.noise_multiplier, self.options.rate)

    def evaluate(self, inputs: Tensor) -> Tensor:
        """The model's outputs without gradients, in eval mode. Nothing of it is left for the next step.

        All ranks call it together; where one has no samples, with zero rows.
        """
        module, recording = self.model.module, nullcontext() if self.private is None else self.private.recorder.paused()
        training = [(one, one.training) for one in module.modules()]
        try:
            with torch.inference_mode(False), torch.no_grad(), recording:  # what is gathered outlives the forward
                module.eval()
                outputs: Tensor = self.model(inputs)
        finally:
            for one, before in training:
                one.training = before
            self.model.reshard()
        return outputs

    def as_many_everywhere(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """This rank's micro-batches, and empty ones behind them up to the largest number that a rank has."""
        if not self.options.unequal_micro_batches:
            return micro_batches
        first = micro_batches[0]
        most = torch.tensor([len(micro_batches)], device=first.inputs.device)
        for axis in (self.model.axis, self.model.replicas):
            collectives.all_reduce_max(MICRO_BATCHES, most, axis)
        missing = int(most.item()) - len(micro_batches)
        return [*micro_batches, *[MicroBatch(first.inputs[:0], first.targets[:0], ())] * missing]

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Reduced gradients of all micro-batches."""
        if self.private is not None:
            self.private.ask(self.loss, micro_batches[0].inputs, micro_batches[0].targets)
            self.private.begin()
        for position, micro in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            self.micro_step(micro, sync=self.options.sync_every or last)
        if self.private is not None:
            self.private.finish()

    def micro_step(self, micro: MicroBatch, sync: bool) -> None:
        """Forward and backward of one micro-batch, also when it has no rows: collectives are the same on all ranks.

        Without ``sync`` its gradients stay local and are reduced together with the next micro-batch's.
        """
        with self.profile.part("forward"):
            losses = self.loss(self.model(micro.inputs), micro.targets)
            _refuse_reduced(losses, micro)
        self.notify("after_forward")
        if self.private is None:
            weights = torch.full_like(losses, self.scale(micro), requires_grad=False)
            self.model.backward(losses, weights, sync=sync)
        else:
            self.private.backward(losses, micro.indices, self.scale(micro), sync=sync)
        if sync:
            with self.profile.part("reduction"):
                self.model.reduce_gradients()
            self.notify("after_reduce")
        self.model.reshard()
        self.notify("after_reshard")

    def abandon(self) -> None:
        """Drop gathered units, gradients and records of a step that raised. No communication."""
        if self.private is not None:
            self.private.forget()
        self.model.abandon()

    def scale(self, micro: MicroBatch) -> float:
        """Weight of one sample on this rank: S/N, with S the number of parts that the logical batch is split into."""
        return self.options.layout.shares(self.model.axis, self.model.replicas) / self.options.normaliser

    def update(self) -> None:
        """The optimizer's step on the shards; elementwise optimizers keep padding at zero."""
        if self.optimizer is not None:
            self.optimizer.step()

    def norms_in_dataset_order(self, bound: int) -> norm_aggregation.InDatasetOrder:
        """The last step's norms of all ranks by global sample index; ``bound`` >= every rank's number of samples."""
        everyone = self.model.axis if self.model.replicas.size == 1 else collectives.axis()
        norms = torch.cat(self.found.norms)
        return norm_aggregation.gather_in_dataset_order(norms, self.found.indices, bound, everyone)


def _refuse_reduced(losses: Tensor, micro: MicroBatch) -> None:
    """Raise ValueError unless there is one loss a sample, and one global number a sample."""
    wanted = len(micro.inputs)
    if losses.shape != (wanted,):
        raise ValueError(
            f"got losses of shape {tuple(losses.shape)} for {wanted} samples, wanted ({wanted},), one a sample: give"
            " the loss reduction='none' and sum over all other axes; Options.normaliser takes the mean"
        )
    if len(micro.indices) != wanted:
        raise ValueError(f"got {len(micro.indices)} indices for {wanted} samples, wanted the global number of each")
