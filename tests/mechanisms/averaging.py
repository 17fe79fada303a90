"""Mechanisms of averaging and accumulating gradients."""

from __future__ import annotations

from tests.mechanisms.planting import Change, Collection

found = Collection("averaging and accumulation")
mechanism = found.mechanism


@mechanism("https://github.com/huggingface/transformers/issues/37766", "gradient (local)")
def normalised_by_one_forward() -> Change:
    """Each forward divides by the items that it has itself, not by those of the whole accumulated batch."""
    return Change("trainer", "Trainer.scale", "/ self.options.normaliser", "/ max(len(micro.indices), 1)")


@mechanism("https://github.com/pytorch/pytorch/issues/154888", "gradient (reduced)")
def replicas_of_single_shards() -> Change:
    """On a mesh of n replicas of one shard each, the all-reduce over the replicas is left out."""
    return Change(
        "sharding.flat_unit",
        "FlatUnit.reduce_gradients",
        "collectives.all_reduce_average(self, piece, self.replicas)",
        "collectives.all_reduce_average(self, piece, self.replicas) if self.axis.size > 1 else piece",
    )


@mechanism("https://github.com/meta-pytorch/opacus/pull/707", "gradient (reduced)", adapter="reference_fsdp2")
def sum_is_the_gradient_itself() -> Change:
    """The sum that is kept over micro-batches is the very tensor into which the next backward adds."""
    return Change(
        "sharding.ignored_parameters",
        "IgnoredParameters.before_backward",
        "if self._trainable[name].grad is averaged:",
        "if self._trainable[name].grad is not averaged:",
    )


@mechanism("https://github.com/NVIDIA/Megatron-LM/pull/6357", "gradient (local)", adapter="reference:bookkeeping")
def unsharded_gradient_overwritten() -> Change:
    """An accumulation that is put off overwrites the unsharded gradient of earlier micro-batches."""
    return Change("sharding.flat_buffer", "FlatBuffer.add_local", "_sum(self._added[position], gradient)", "gradient")


@mechanism(
    "https://github.com/deepspeedai/DeepSpeed/issues/8224",
    "gradient (local)",
    stated=False,
    adapter="reference:bookkeeping",
)
def last_use_only() -> Change:
    """Of a parameter that is used several times in a step, only the last use's gradient is taken."""
    return Change(
        "clipping.tied_parameters",
        "weighted_gradients",
        "found[name] = found[name] + gradient if name in found else gradient",
        "found[name] = gradient",
    )


@mechanism("https://github.com/NVIDIA/Megatron-LM/pull/5956", "gradient (reduced)")
def summed_over_the_other_axis() -> Change:
    """Over one axis of the mesh gradients are added up, and not divided by its size as over the others."""
    return Change("sharding.collectives", "all_reduce_average", "op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM")


@mechanism("https://github.com/modelscope/FunASR/pull/3472", "gradient (reduced)")
def first_micro_batch_synchronised() -> Change:
    """Without a reduction a micro-batch, the first micro-batch is reduced, and the others never are."""
    return Change("trainer", "Trainer.accumulate", "position == len(micro_batches) - 1", "position == 0")


@mechanism("https://github.com/InfiniTensor/InfiniTrain/pull/183", "gradient (reduced)", adapter="reference_fsdp2")
def rebound_gradient_loses_the_sum() -> Change:
    """When ``grad`` is bound to a new buffer, what earlier micro-batches had put into the old one is dropped."""
    return Change(
        "sharding.ignored_parameters",
        "IgnoredParameters.average",
        "local if before is None else before + local",
        "local",
    )
