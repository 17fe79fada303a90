"""PyTorch FSDP2: ``torch.distributed.fsdp.fully_shard``, parameters sharded one by one on their first dimension.

With replicas (dp_replicate > 1) it is HSDP: gradients are reduce-scattered in a replica, then all-reduced over them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fsdpcheck.adapters.builtin import _torch_sampler
from fsdpcheck.adapters.builtin._fsdp2_features import NO_WAY_BACK, WAY_BACK, Loop, shard
from fsdpcheck.adapters.capabilities import Sampler, SamplerSetup
from fsdpcheck.adapters.contract import Features, Promise, Setup, Snippets, Trait
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop

_LIFECYCLE: frozenset[Promise] = frozenset({"hooks", "parameter-hooks", "memory", *WAY_BACK})
_FEATURES: frozenset[Promise] = frozenset(
    {
        "features.unshard", "features.prefetch", "features.some-sync", "features.late-all-reduce",
        "features.divide-factor", "features.no-gather", "features.checkpointing", "features.meta",
        "features.state-dict", "features.ignored", "features.columns", "features.compiled", "features.bare-root",
        "features.groups-of-two", "features.broadcast",
    }
)  # fmt: skip


class FullyShard:
    """Each unit by ``fully_shard``, then the root. Tied layers must be in one unit: sharding them apart unties them."""

    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded", "epochs", "thawing", *_LIFECYCLE, *_FEATURES}),
        accepts=ORDINARY - {"inference-mode"}
        | {"matrix-optimizer", "row-optimizer", "thawed", "frozen-again", "bare-units"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        reasons={
            **PLAIN_REASONS,
            "padding.zero": "a DTensor hides the padding of its last shard; it has no public view of it",
            "padding.unread": "a DTensor hides the padding of its last shard; it has no public view of it",
            "lifecycle": "gathers the next unit ahead, and has no public view of what is gathered",
            "features.broadcast-buffers": "starts from a state dict of rank 0, which has no such buffers",
            **NO_WAY_BACK,
        },
    )

    snippets = Snippets(
        imports="from torch.distributed.fsdp import fully_shard",
        parallelize="for name in UNITS:\n"
        "    fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward={reshard})\n"
        "parallel = fully_shard(model, mesh=mesh, reshard_after_forward={reshard})",
        before="parallel.set_requires_gradient_sync(reduces)",
        whole="whole = {name: value.full_tensor() for name, value in model.named_parameters()}",
    )

    def __init__(
        self,
        name: str = "fully_shard",
        by_the_book: bool = False,
        more: Trait | None = None,
        thaws_as_it_lies: bool = False,
    ) -> None:
        self.name, self._by_the_book, self._thaws_as_it_lies = name, by_the_book, thaws_as_it_lies
        self.features = replace(self.features, accepts=self.features.accepts | ({more} if more else set()))

    def sampler(self, setup: SamplerSetup) -> Sampler:
        return _torch_sampler.Shares(setup)

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        return Loop(model, setup, shard(model, setup, self._by_the_book), self._thaws_as_it_lies)


adapter = FullyShard()
by_the_book = FullyShard("fully_shard, recovering as documented", by_the_book=True)
"""A known finding: ``reset_iter_state`` of torch 2.13 says that it drops the gradients of micro-batches that were not
reduced, and keeps them."""
thawing = FullyShard("fully_shard, thawed as it lies", thaws_as_it_lies=True)
"""A known finding: what is kept gathered behind an evaluation, as the root is, and thawed there, is frozen again when
it is freed, which is the next backward, without a word (torch 2.13)."""
inferring = FullyShard("fully_shard, in inference mode", more="inference-mode")
"""A known finding: what a first forward in ``torch.inference_mode`` gathers into stays an inference tensor, and the
first training step raises; on one rank that forward raises itself (torch 2.13; the latter is pytorch#197327)."""
routed = FullyShard("fully_shard, layers left out", more="routed")
"""A known finding: of a unit only parameters that have a gradient are reduced, so where ranks leave out other layers of
it, as samples choose experts, they send buffers of other sizes (pytorch#158719)."""
