"""PyTorch's ``DistributedDataParallel``: whole parameters on every rank, gradients divided by W and then summed."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.adapters.builtin import _torch_sampler
from fsdpcheck.adapters.capabilities import Sampler, SamplerSetup
from fsdpcheck.adapters.contract import ArithmeticRule, Features, Setup, Snippets
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop


class DistributedDataParallelAdapter:
    """The model as a whole, with the defaults of ``DistributedDataParallel``; units do not matter to it.

    Its reducer multiplies each gradient by 1/W where it copies it into a bucket, and then sums; gradients that are
    reduced after every micro-batch are averaged again with the next one's, which changes nothing but their rounding.
    A bucket that waits for the gradient of a parameter that the forward does not use is never reduced, and the next
    forward raises: for a model with such parameters ``finding_unused`` says ``find_unused_parameters=True``.
    """

    features = Features(
        promises=frozenset(
            {"plain", "global-norm", "epochs", "hooks", "features.broadcast", "features.broadcast-buffers"}
        ),
        accepts=ORDINARY - {"hsdp", "bfloat16"}
        | {"unequal-micro-batches", "matrix-optimizer", "row-optimizer", "tied-apart"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=ArithmeticRule(averaging="before"),
        reasons={
            **PLAIN_REASONS,
            "sharded": "keeps every parameter whole on every rank",
            "padding.zero": "keeps parameters whole: there is no padding",
            "padding.unread": "keeps parameters whole: there is no padding",
            "lifecycle": "keeps parameters whole: nothing is gathered or freed",
            "memory": "keeps parameters whole: nothing is gathered or freed",
            "thawing": "reduces what is trained when it is built, as its documentation says; ddp:thawing promises it",
            "parameter-hooks": "sets gradients in every backward, reduced or not, and hooks on parameters fire then",
            "interrupts": "has no way back from a backward that raised: its next forward raises too",
            "features": "the other features are those of FSDP2",
        },
    )

    def __init__(self, name: str, find_unused: bool = False, thaws: bool = False) -> None:
        self.snippets = Snippets(
            imports="from contextlib import nullcontext\nfrom torch.nn.parallel import DistributedDataParallel",
            parallelize=f"parallel = DistributedDataParallel(model, find_unused_parameters={find_unused})",
            context="nullcontext() if reduces else parallel.no_sync()",
        )
        self.name, self._find_unused = name, find_unused
        if find_unused:
            self.features = replace(self.features, accepts=self.features.accepts | {"routed", "routed-alone"})
        if thaws:
            self.features = replace(self.features, promises=self.features.promises | {"thawing"})

    def sampler(self, setup: SamplerSetup) -> Sampler:
        return _torch_sampler.Shares(setup)

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        return TrainingLoop(
            DistributedDataParallel(model, find_unused_parameters=self._find_unused), setup, named=model
        )


adapter = DistributedDataParallelAdapter("ddp")
finding_unused = DistributedDataParallelAdapter("ddp, finding unused parameters", find_unused=True)
thawing = DistributedDataParallelAdapter("ddp, frozen parameters thawed", thaws=True)
"""A known finding: what is frozen when DistributedDataParallel is built, and thawed behind a step, is never reduced.
Each rank goes on by itself, without a word (Lightning#20340)."""
