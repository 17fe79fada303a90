"""Planted bugs of lifecycle: memory that is held too long, twice or by others, hooks, what an exception leaves."""

from __future__ import annotations

from typing import Any

import torch

from ._fault import Function, Hit, fault


@fault(
    "sharding.flat_model:ShardedModel._free_unless_kept",
    "units that stay unsharded, https://github.com/pytorch/pytorch/issues/83129",
    "lifecycle.gathered",
    cause="not freed when its forward",
)
def forward_frees_nothing(original: Function, hit: Hit) -> Function:
    """Inner units are kept after the forward, whether they should be or not; all are freed by their backward."""

    def planted(self: Any, unit: Any) -> None:
        if self.reshard_after_forward and unit is not self.units[0]:
            hit()

    return planted


@fault(
    "sharding.flat_buffer:FlatBuffer.drop_local_gradients",
    "gradients set to zero, not to None, https://github.com/pytorch/pytorch/pull/92731",
    "lifecycle.released",
    cause="not released when it is reduced",
)
def gradients_zeroed_not_released(original: Function, hit: Hit) -> Function:
    """Local gradients are filled with zeros when they have been reduced, and their memory is kept."""

    def planted(self: Any) -> None:
        kept = [parameter.grad for parameter in self.parameters]
        original(self)
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            if gradient is not None:
                hit()
                parameter.grad = gradient.zero_()

    return planted


@fault(
    "sharding.flat_buffer:FlatBuffer.__init__",
    "one rank that holds shard and whole apart",
    "lifecycle.aliased",
    cause="shard is a copy",
)
def shard_copied_on_one_rank(original: Function, hit: Hit) -> Function:
    """With one rank the shard is a copy of the full buffer, which nothing gathers again."""

    def planted(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if self.is_shard:
            hit()
            self.shard.data = self.shard.data.clone()

    return planted


@fault(
    "sharding.flat_model:ShardedModel.__call__",
    "a recomputation taken for a second use, https://github.com/meta-pytorch/opacus/pull/738",
    "lifecycle.hooks",
    cause="computed more than once",
)
def forward_computed_twice(original: Function, hit: Hit) -> Function:
    """The forward is computed twice, and the second result is used."""

    def planted(self: Any, *inputs: Any) -> Any:
        hit()
        original(self, *inputs)
        return original(self, *inputs)

    return planted


@fault(
    "sharding.flat_model:ShardedModel.reshard",
    "units that stay unsharded, https://github.com/pytorch/pytorch/issues/83129",
    "lifecycle.memory",
    cause="not freed when the step is over",
)
def nothing_freed_after_a_step(original: Function, hit: Hit) -> Function:
    """What is still gathered after the backward, the root at least, stays so."""

    def planted(self: Any) -> None:
        hit()

    return planted


@fault(
    "sharding.flat_model:ShardedModel._free_unless_kept",
    "one layer that is never freed, https://github.com/pytorch/pytorch/issues/83129",
    "lifecycle.memory",
    cause="not freed when its forward",
)
def one_unit_outlives_its_forward(original: Function, hit: Hit) -> Function:
    """The first inner unit is kept after its forward, whether it should be or not; its backward frees it."""

    def planted(self: Any, unit: Any) -> None:
        if self.reshard_after_forward and unit in self.units[1:2]:
            hit()
        else:
            original(self, unit)

    return planted


@fault(
    "sharding.flat_model:ShardedModel._free_unless_kept",
    "reshard_after_forward=False without effect, https://github.com/pytorch/pytorch/issues/149029",
    "lifecycle.memory",
    cause="gathered again while it is kept",
)
def kept_units_are_freed(original: Function, hit: Hit) -> Function:
    """Inner units are freed after their forward whether they are to be kept or not, and gathered anew."""

    def planted(self: Any, unit: Any) -> None:
        if not self.reshard_after_forward and unit is not self.units[0]:
            hit()
            unit.reshard()
        else:
            original(self, unit)

    return planted


@fault(
    "sharding.flat_model:ShardedModel.full_values",
    "DTensor.full_tensor, which gives away live memory on one rank",
    "lifecycle.copies",
    cause="live memory",
)
def live_parameters_given_away(original: Function, hit: Hit) -> Function:
    """On one rank the trainer shows the parameters themselves."""

    def planted(self: Any) -> Any:
        if self.axis.size > 1:
            return original(self)
        hit()
        buffers = [buffer for unit in self.units for buffer in unit.buffers]
        pairs = [zip(buffer.names, buffer.views(buffer.full), strict=True) for buffer in buffers]
        return {name: view for pair in pairs for name, view in pair}

    return planted


@fault(
    "trainer:Trainer.micro_step",
    "criterion.reduction that stays as it was set for a call, opacus.utils.fast_gradient_clipping_utils",
    "lifecycle.loss",
    cause="what a step does to the loss is not undone",
)
def hooks_left_on_the_loss(original: Function, hit: Hit) -> Function:
    """Each micro-batch hangs a hook into the user's loss, where it is a module, and none is taken away."""

    def planted(self: Any, *given: Any, **more: Any) -> Any:
        if isinstance(self.loss, torch.nn.Module):
            hit()
            self.loss.register_forward_hook(lambda *_: None)
        return original(self, *given, **more)

    return planted


@fault(
    "sharding.flat_model:ShardedModel.zero_grad",
    "reset_iter_state, which keeps gradients of micro-batches that were not reduced",
    "lifecycle.interrupted",
    cause="right where nothing is interrupted",
)
def unreduced_gradients_outlive_an_exception(original: Function, hit: Hit) -> Function:
    """Whole local gradients of a step that raised are added to those of the next."""

    def planted(self: Any) -> None:
        for shard in self.shards():
            shard.grad = None
        hit()

    return planted


@fault(
    "trainer:Trainer.abandon",
    "clipping switched off for a pass and not on again when it raises, as of a context without a finally",
    "lifecycle.interrupted",
    cause="right where nothing is interrupted",
)
def nothing_is_clipped_after_an_exception(original: Function, hit: Hit) -> Function:
    """When a step has raised, every sample has the clip factor 1 from then on."""

    def planted(self: Any) -> None:
        original(self)
        if self.private is not None:
            hit()
            factors = self.private.clip_factors
            self.private.clip_factors = lambda *given: torch.ones_like(factors(*given))

    return planted


@fault(
    "trainer:Trainer.abandon",
    "noise switched off for a pass and not on again when it raises, as of a context without a finally",
    "lifecycle.interrupted",
    cause="right where nothing is interrupted",
)
def no_noise_after_an_exception(original: Function, hit: Hit) -> Function:
    """When a step has raised, no noise is added from then on."""

    def planted(self: Any) -> None:
        original(self)
        if self.private is not None:
            hit()
            self.private.add_noise = lambda step, normaliser: None

    return planted


@fault(
    "torch:Tensor.register_post_accumulate_grad_hook",
    "a hook on a sharded parameter that never fires, https://github.com/meta-pytorch/torchrec/pull/4268",
    "lifecycle.parameter-hooks",
    cause="autograd does not see",
    subject="fully_shard",
)
def hook_on_a_shard_never_fires(original: Function, hit: Hit) -> Function:
    """Hooks go to a parameter that the next gather makes anew, and are never called."""

    def planted(self: Any, hook: Function) -> Any:
        hit()
        return original(torch.nn.Parameter(torch.zeros(1)), hook)

    return planted
