"""Trainer: one training step, plain or with per-sample clipping, over a sharded model.

A private step takes each micro-batch through one forward and two backwards (ghost clipping): the first yields norms,
the second the gradient of sum_i c_i L_i; or through one of each, with bookkeeping (see modes.py). No per-sample weight
gradient is kept, and with complete contributions the norms cost no communication.

Loss convention: the released gradient is (1/N) * sum over the logical batch. Reductions average over the W ranks, so a
rank weighs each of its samples W/N when the batch is distributed and 1/N when it is replicated; this is right whatever
the local sizes are.

Source: Li et al. 2021, arXiv:2110.05679 (two passes); Zhao et al. 2023, arXiv:2304.11277 (sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from . import aggregate, clip, collectives, hooks, modes
from .modes import Mode
from .sharded import Sharded

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

    ``normaliser`` is N. ``clip_norm`` C makes the step private (None: plain). ``max_grad_norm`` clips the global norm
    of a plain step. ``sync_every`` reduces after each micro-batch instead of after the last. ``contribution`` is
    "complete", "partial" or "mixed" and needs ``replicated`` unless complete. ``mode``: see modes.py; it may be
    changed between steps.
    """

    normaliser: float
    replicated: bool = False
    clip_norm: float | None = None
    max_grad_norm: float | None = None
    sync_every: bool = True
    contribution: Literal["complete", "partial", "mixed"] = "complete"
    mode: Mode = modes.DEFAULT


@dataclass
class Report:
    """What the last step computed on this rank. ``norms``, ``factors``, ``indices``: [local samples], private only."""

    norms: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    grad_norm: Tensor | None = None


class Trainer:
    """Trains a sharded ``model``. ``loss(outputs, targets)`` gives per-sample losses [b].

    All ranks construct it with equal values, and call each method together, with equally many micro-batches each (of
    zero rows where a rank has no samples). ``notify`` is called at the moments named above. Over the model's replicas
    (HSDP) each rank has samples of its own unless the batch is replicated.
    """

    def __init__(
        self,
        model: Sharded,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: OptimizerFactory,
        options: Options,
        *,
        notify: Callable[[Moment], None] = lambda moment: None,
    ) -> None:
        self.model, self.options, self.loss, self.notify = model, options, loss, notify
        self.axis, self.replicas = model.axis, model.replicas
        self.layout: aggregate.Layout = "replicated" if options.replicated else "distributed"
        self.report = Report()
        self.recorder: hooks.Recorder | None = None
        if options.clip_norm is not None:
            layers = hooks.layers_of(self.model, options.contribution)
            aggregate.refuse_impossible(self.layout, [layer.contribution for layer in layers])
            self.recorder = hooks.Recorder(layers)
        shards = self.model.shards()
        self.optimizer = optimizer(shards) if shards else None

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """One optimizer step on this rank's share of the logical batch."""
        if not micro_batches:
            raise ValueError("no micro-batch: a rank without samples passes micro-batches of zero rows like the others")
        self.model.zero_grad()
        self.report = Report()
        if self.recorder is not None:
            self.recorder.forget()
        for position, micro in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            self.micro_step(micro, sync=self.options.sync_every or last)
        if self.options.max_grad_norm is not None:
            self.report.grad_norm = clip.clip_global_norm(self.model, self.options.max_grad_norm)
        self.notify("before_step")
        self.update()

    def micro_step(self, micro: MicroBatch, sync: bool) -> None:
        """Forward and backward of one micro-batch, also when it has no rows: collectives are the same on all ranks.

        Without ``sync`` its gradients stay local and are reduced together with the next micro-batch's.
        """
        losses = self.loss(self.model(micro.inputs), micro.targets)
        self.notify("after_forward")
        if self.options.clip_norm is None:
            weights = torch.full_like(losses, self.scale(micro), requires_grad=False)
            self.model.backward(losses, weights, sync=sync)
        else:
            self.private_backward(micro, losses, self.options.clip_norm, sync)
        if sync:
            self.model.reduce_gradients()
            self.notify("after_reduce")
        self.model.reshard()
        self.notify("after_reshard")

    def private_backward(self, micro: MicroBatch, losses: Tensor, clip_norm: float, sync: bool) -> None:
        """Clipped gradients of one micro-batch, in two passes or from what one pass kept."""
        assert self.recorder is not None
        mode = modes.in_force(self.options.mode)
        weights = self.clip_factors(micro, losses, clip_norm, mode) * self.scale(micro)
        if mode.passes == "two_pass":
            self.model.backward(losses, weights, sync=sync)
        else:
            self.model.add_gradients(self.recorder.weighted_gradients(weights))

    def clip_factors(self, micro: MicroBatch, losses: Tensor, clip_norm: float, mode: Mode) -> Tensor:
        """[b]: first backward, norms, factors."""
        assert self.recorder is not None
        with self.model.gradients_of_outputs(again=mode.passes == "two_pass"):
            terms = self.recorder.squared_norm_terms(losses, mode)
        self.notify("after_first_backward")
        squared = aggregate.squared_norms(terms, self.layout, self.axis)
        factors = clip.factors(squared, clip_norm)
        self.report.norms.append(clip.norms(squared))
        self.report.factors.append(factors)
        self.report.indices.extend(micro.indices)
        self.notify("after_norms")
        return factors

    def scale(self, micro: MicroBatch) -> float:
        """Weight of one sample on this rank: W/N, or 1/N when every rank has all samples."""
        return (1 if self.options.replicated else self.axis.size * self.replicas.size) / self.options.normaliser

    def update(self) -> None:
        """The optimizer's step on the shards; elementwise optimizers keep padding at zero."""
        if self.optimizer is not None:
            self.optimizer.step()

    def norms_in_dataset_order(self, bound: int) -> aggregate.InDatasetOrder:
        """The last step's norms of all ranks by global sample index; ``bound`` >= every rank's number of samples."""
        everyone = self.axis if self.replicas.size == 1 else collectives.axis()
        return aggregate.gather_in_dataset_order(torch.cat(self.report.norms), self.report.indices, bound, everyone)
