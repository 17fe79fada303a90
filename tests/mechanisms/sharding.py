"""Mechanisms of sharding: offsets and padding, dtypes of shards, frozen parameters."""

from __future__ import annotations

from tests.mechanisms.planting import Change, Collection

found = Collection("sharding, precision, frozen parameters")
mechanism = found.mechanism


@mechanism("https://github.com/pytorch/pytorch/issues/161368", "noise", stated=False, adapter="reference_fsdp2")
def offset_from_own_size() -> Change:
    """A shard's offset is its rank times its own size, which is wrong where it is smaller than those before it."""
    return Change(
        "sharding.row_layout",
        "RowLayout.rows",
        "slice(min(rank * chunk, n), min((rank + 1) * chunk, n))",
        "slice(rank * min(chunk, max(n - rank * chunk, 0)), (rank + 1) * min(chunk, max(n - rank * chunk, 0)))",
    )


@mechanism("https://github.com/deepspeedai/DeepSpeed/pull/202", "exception", stated=False)
def count_no_multiple_of_ranks() -> Change:
    """A shard's size is rounded down: it fails where the number of elements is no multiple of the ranks."""
    return Change(
        "sharding.flat_buffer", "FlatBuffer.__init__", "-(-self.numel // axis.size)", "self.numel // axis.size"
    )


@mechanism("https://github.com/microsoft/ltp-megatron-lm/pull/29", "global norm")
def range_begins_below_zero() -> Change:
    """A parameter that begins inside a rank's shard gets a flattened range that begins below zero."""
    return Change(
        "sharding.flat_buffer",
        "FlatBuffer.owned",
        "min(max(self.start - offset, 0), self.sizes[position])",
        "min(self.start - offset, self.sizes[position])",
    )


@mechanism("https://github.com/huggingface/accelerate/issues/3979", "parameter after step")
def shards_of_rounded_parameters() -> Change:
    """The master copy is made of parameters that have been rounded to the compute dtype already."""
    return Change(
        "sharding.flat_buffer",
        "FlatBuffer.__init__",
        "[parameter.detach() for parameter in named.values()])",
        "[parameter.detach() for parameter in self.parameters])",
    )


@mechanism("https://github.com/pytorch/pytorch/issues/190626", "gradient (reduced)")
def reduced_in_the_compute_dtype() -> Change:
    """Gradients travel and are averaged in the compute dtype, where the policy asks for a wider one."""
    return Change(
        "sharding.flat_unit",
        "FlatUnit.reduce_gradients",
        "collectives.reduce_scatter_average(self, full, self.axis)",
        "collectives.reduce_scatter_average(self, full.to(self.trainable.full.dtype), self.axis).to(full.dtype)",
    )


@mechanism("https://github.com/pytorch/pytorch/pull/125191", "gradient (local)")
def accumulated_in_the_compute_dtype() -> Change:
    """Micro-batches that are reduced together are added up in the compute dtype."""
    return Change(
        "sharding.flat_buffer", "FlatBuffer.lift_gradients", "parameter.grad.dtype != self.dtype",
        "parameter.grad.dtype == self.dtype",
    )  # fmt: skip


@mechanism("https://github.com/facebookresearch/fairscale/pull/721", "parameter after step")
def flag_of_the_first_parameter() -> Change:
    """A flat parameter does not take over who is frozen: one flag holds for all that lie in it."""
    return Change(
        "sharding.flat_unit",
        "_buffer",
        "if p.requires_grad == trainable",
        "if next(iter(named.values())).requires_grad == trainable",
    )


@mechanism("https://github.com/pytorch/pytorch/issues/105371", "parameter after step")
def thawing_goes_unseen() -> Change:
    """``requires_grad`` of a parameter is changed after sharding, and neither obeyed nor refused."""
    return Change(
        "sharding.parameter_slots",
        "change",
        "if now.requires_grad != one.requires_grad:",
        "if now.requires_grad is not bool(now.requires_grad):",
    )


@mechanism("https://github.com/pytorch/pytorch/pull/101982", "memory")
def frozen_units_stay_gathered() -> Change:
    """What frees a unit in the backward is hung on its gradients: units that are frozen stay gathered to the end."""
    return Change(
        "sharding.flat_model",
        "ShardedModel._before_forward",
        "if not torch.is_grad_enabled() or not tensors",
        "if unit.trainable is None or not torch.is_grad_enabled() or not tensors",
    )
