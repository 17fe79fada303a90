"""The words of the contract, each told once: what an adapter promises, which moments it announces, what it shows.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

Moment = Literal[
    "after_forward", "after_first_backward", "after_norms", "after_reduce", "after_reshard", "before_step"
]  # fmt: skip
"""A moment of a step, announced on every rank by ``Setup.notify(moment, trainer)``, so that the laws look there.

A micro-batch of no samples has them too. Where one that a promise needs is missing, in any step on any rank, its laws
end in AdapterError, exit code 2, and hold of nothing. The harness itself looks after ``build`` and after each
``Trainer.step`` ("after_init", "after_step").
"""
Observable = Literal["params", "grads", "norms", "factors", "shards", "grad_norm", "units", "accounted"]
"""What a trainer can show of a step."""
Use = Literal[
    "unshard", "prefetch", "some-sync", "late-all-reduce", "divide-factor", "no-gather", "checkpointing", "meta",
    "state-dict", "ignored", "columns", "compiled", "bare-root", "groups-of-two", "broadcast",
]  # fmt: skip
"""A feature, most of FSDP2, that a training may use (``Setup.using``), and none of which may change a bit."""
Promise = Literal[
    "plain", "private", "exact-factors", "padding.zero", "padding.unread", "deferred", "global-norm", "partial-norms",
    "dataset-order", "second-backward", "bookkeeping", "noise", "noise-of-seed", "state", "resharded", "readable",
    "stored",
    "lifecycle",
    "sharded", "nonfinite", "epochs", "poisson", "same-draws", "kernels",
    "hooks", "parameter-hooks", "memory", "copies", "interrupts", "accounted", "engine", "thawing", "across-samples",
    "features.unshard", "features.prefetch", "features.some-sync", "features.late-all-reduce",
    "features.divide-factor", "features.no-gather", "features.checkpointing", "features.meta", "features.state-dict",
    "features.ignored", "features.columns", "features.compiled", "features.bare-root", "features.groups-of-two",
    "features.broadcast", "features.broadcast-buffers",
]  # fmt: skip
"""What an adapter can promise; each law names one."""


@dataclass(frozen=True, slots=True)
class MomentRow:
    """What has happened at a moment. ``once``: behind what it comes at least once. ``private``: in private steps only.

    A reduction comes of each micro-batch, or with ``StepSpec.sync_every`` off of the last.
    """

    meaning: str
    once: Literal["micro-batch", "reduction", "step"]
    private: bool = False


MOMENTS: Final[Mapping[Moment, MomentRow]] = {
    "after_forward": MomentRow("The forward of a micro-batch has run.", "micro-batch"),
    "after_first_backward": MomentRow("The backward that norms of samples come of has run.", "micro-batch", True),
    "after_norms": MomentRow("Norms and clip factors are there, and clipped gradients are not.", "step", True),
    "after_reduce": MomentRow("Gradients are reduced, and not yet clipped by their global norm.", "reduction"),
    "after_reshard": MomentRow("The backward of a micro-batch has run, and its units are freed.", "micro-batch"),
    "before_step": MomentRow("Gradients are clipped and have their noise; the optimizer has not run.", "step"),
}
"""Every moment, in the order of a step."""

OBSERVABLES: Final[Mapping[Observable, str]] = {
    "params": "parameters",
    "grads": "gradients",
    "norms": "norms",
    "factors": "factors",
    "shards": "shards",
    "grad_norm": "grad_norm",
    "units": "units",
    "accounted": "accounted",
}
"""Every observable -> the method of ``Observed`` that gives it, and says what it is."""

FEATURES: Final[Mapping[Use, str]] = {
    "unshard": "units are gathered by hand before the forward (unshard(async_op=True), then wait)",
    "prefetch": "each unit gathers the two that come after it, in the forward and in the backward",
    "some-sync": "of the micro-batches between two reductions the first is reduced too",
    "late-all-reduce": "with replicas, gradients are reduce-scattered after each micro-batch and all-reduced after the"
    " last",
    "divide-factor": "reductions divide by 2 W, and losses are doubled",
    "no-gather": "units of Embeddings, whose backward needs no weight, are not gathered for it",
    "checkpointing": "units compute their forward again in the backward",
    "meta": "the model is sharded on the meta device and filled afterwards",
    "state-dict": "after each step the parameters are taken out as a full state dict, spoilt, and come back from rank"
    " 0's",
    "ignored": "one parameter is left out of sharding, and its user averages its gradient",
    "columns": "weights whose second dimension the ranks divide are sharded on it",
    "compiled": "the forward of each unit goes through Setup.compile",
    "bare-root": "what the units leave is a unit too, and the root has no parameters",
    "groups-of-two": "after the forward parameters stay sharded over pairs of ranks",
    "broadcast": "all ranks and replicas start from the model that rank 0 has built, whatever each has built",
}
"""Every feature -> what a training does that uses it."""


@dataclass(frozen=True, slots=True)
class PromiseRow:
    """What an implementation guarantees that makes a promise, and what the promise says nothing without.

    ``promises``: other ones. ``adapter``: methods of the adapter. ``moments``: those that its laws look at; of "noise"
    only where the adapter shows "shards". ``trains``: whether its laws train a model. What must be shown follows from
    the laws (judging.registry), and methods of a trainer from what a run calls (program.methods), since a trainer may
    have other ones in a private training.
    """

    meaning: str
    promises: tuple[Promise, ...] = ()
    adapter: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()
    trains: bool = True


_PRIVATE: Final[tuple[Promise, ...]] = ("private",)
_PADDING: Final[tuple[Moment, ...]] = ("after_reduce", "before_step")

PROMISES: Final[Mapping[Promise, PromiseRow]] = {
    "plain": PromiseRow("A step without clipping of samples equals the single device's, bit for bit."),
    "private": PromiseRow(
        "A step that clips each sample equals the single device's, within the rounding of its own clip factors."
    ),
    "exact-factors": PromiseRow(
        "A clip factor is a function of one squared norm of its sample, so clipped steps are equal bit for bit.",
        promises=_PRIVATE,
    ),
    "padding.zero": PromiseRow(
        "Padding is zero after init, after each reduction, and before and after the optimizer's update.",
        moments=_PADDING,
    ),
    "padding.unread": PromiseRow("Nothing reads padding.", moments=_PADDING),
    "deferred": PromiseRow("Norms may be computed after the first backward.", promises=_PRIVATE),
    "global-norm": PromiseRow(
        "The step clips by the global gradient norm and returns it. Of a gradient that is not finite no rank returns a"
        " norm that is, or all ranks raise."
    ),
    "partial-norms": PromiseRow(
        "Each rank can form its own share of the squared norms of a replicated batch.", promises=_PRIVATE
    ),
    "dataset-order": PromiseRow(
        "Every rank can report the norms of the whole logical batch, by global sample number (Observed.ordered_norms).",
        promises=_PRIVATE,
    ),
    "second-backward": PromiseRow(
        "Clipped gradients come of one backward through the re-weighted losses, so that on real numbers a rank's own"
        " gradient can be replayed bit for bit.",
        promises=_PRIVATE,
    ),
    "bookkeeping": PromiseRow(
        "Clipped gradients are contracted from what the one backward left, in the parameters' precision, so that no"
        " clip factor is rounded to what the model computes in (arXiv:2210.00038).",
        promises=_PRIVATE,
    ),
    "noise": PromiseRow(
        "A step adds Gaussian noise of StepSpec.noise_multiplier, independent in each element and step, equal on all"
        " ranks; the same trainer on the same ranks and batches draws the same.",
        promises=_PRIVATE,
        moments=_PADDING,
    ),
    "noise-of-seed": PromiseRow(
        "The noise is a function of Setup.seed, parameter, element and step alone.", promises=_PRIVATE
    ),
    "state": PromiseRow(
        "A training is saved and goes on in a new trainer, with the bits of one that never stopped (Observed.save,"
        " Observed.load)."
    ),
    "resharded": PromiseRow("What is saved is loaded at any number of ranks.", promises=("state",)),
    "readable": PromiseRow(
        "An ordinary model is filled from what is saved, without the ranks that saved it.",
        promises=("state",),
        adapter=("read",),
    ),
    "stored": PromiseRow(
        "A checkpoint holds each parameter once, in its own shape and without padding (Keeping).",
        promises=("readable",),
        adapter=("stored",),
    ),
    "lifecycle": PromiseRow(
        "The step gathers one inner unit at a time, frees it when it has been used, and leaves no gradient unreduced"
        " (Observed.units).",
        moments=tuple(MOMENTS),
    ),
    "sharded": PromiseRow(
        "Each element of a trained parameter lies on one rank of the shards' axis, and replicas hold the same"
        " (Observed.local_tensors)."
    ),
    "nonfinite": PromiseRow(
        "All ranks together refuse a sample whose gradient norm is NaN or infinite, by an exception that names its"
        " global number and leaves parameters as they were; or they leave it out, as if the batch had come without it.",
        promises=_PRIVATE,
    ),
    "epochs": PromiseRow(
        "The sampler deals each epoch out to the ranks in shares of equal length, in an order that follows from seed"
        " and epoch where it shuffles (Sampling).",
        adapter=("sampler",),
        trains=False,
    ),
    "poisson": PromiseRow(
        "The sampler's steps are Poisson draws: each record joins by itself, with the same probability, on one rank"
        " alone.",
        adapter=("sampler",),
        trains=False,
    ),
    "same-draws": PromiseRow(
        "Which records a Poisson draw takes is a function of seed, record and step alone, so that it is the same at any"
        " number of ranks and after a stop.",
        adapter=("sampler",),
        trains=False,
    ),
    "kernels": PromiseRow(
        "The kernels compute per-sample squared norms of a Linear (Kernels).", adapter=("kernels",), trains=False
    ),
    "hooks": PromiseRow("Hooks that the user registered on modules before build fire as on a single device."),
    "parameter-hooks": PromiseRow(
        "Post-accumulate hooks on the parameters that the optimizer is given fire as on a single device, once a"
        " reduction."
    ),
    "memory": PromiseRow(
        "build shards the model's own modules in place, and between steps they hold no more than before the first; each"
        " step gathers as much as the one before: the root, the unit at work and the next one at most, unless units are"
        " kept for their backward."
    ),
    "copies": PromiseRow("What the trainer shows shares no memory with what it trains."),
    "interrupts": PromiseRow(
        "A step that raised on every rank, in its forward or backward, leaves a trainer whose next step is right."
    ),
    "accounted": PromiseRow(
        "An accountant is told what ran: at each step the noise multiplier and Setup.rate, once; and all of it also"
        " where a training was saved and goes on (Observed.accounted).",
        promises=("noise",),
    ),
    "engine": PromiseRow(
        "All that is public of a training that is built on a data set is the same if the data set has a record less"
        " (Engine).",
        adapter=("engine",),
        trains=False,
    ),
    "thawing": PromiseRow(
        "A parameter that is frozen at first and thawed between two steps is trained from then on, and no more once it"
        " is frozen again, or that is refused (Observed.thaw, Observed.freeze)."
    ),
    "across-samples": PromiseRow(
        "A model or a loss that computes across the samples of a batch, as BatchNorm does, is refused on all ranks.",
        promises=_PRIVATE,
    ),
    **{
        cast(Promise, f"features.{use}"): PromiseRow(f'A plain step is the same bits with "{use}" in use: {words}.')
        for use, words in FEATURES.items()
    },
    "features.broadcast-buffers": PromiseRow(
        'With "broadcast" in use, buffers that no state dict has are rank 0\'s too.', promises=("features.broadcast",)
    ),
}
"""Every promise."""

WITHOUT_MODEL: frozenset[Promise] = frozenset(name for name, row in PROMISES.items() if not row.trains)
"""Promises whose laws train no model."""
