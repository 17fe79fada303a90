"""Mechanisms of collectives and of what is gathered when: who calls, who waits, who decides."""

from __future__ import annotations

from tests.mechanisms.planting import Change, Collection

found = Collection("collectives and lifecycle")
mechanism = found.mechanism


@mechanism("https://github.com/vllm-project/vllm-ascend/pull/12811", "collective")
def gather_never_waited_for() -> Change:
    """An all-gather is begun, its handle is dropped, and what it fills is read at once."""
    return Change(
        "sharding.collectives", "all_gather", "shard, group=axis.group)", "shard, group=axis.group, async_op=True)"
    )


@mechanism("https://github.com/NVIDIA-NeMo/Automodel/pull/2468", "hang")
def backward_skipped_without_samples() -> Change:
    """A rank that has nothing to learn from in a micro-batch leaves out its backward, and the collectives in it."""
    return Change(
        "sharding.flat_model", "ShardedModel.backward", "if outputs.requires_grad:",
        "if outputs.requires_grad and len(outputs) > 0:",
    )  # fmt: skip


@mechanism("https://github.com/ecmwf/WeatherGenerator/pull/2718", "exception")
def first_rank_decides() -> Change:
    """Whether a step is given up for a NaN is decided from the samples of rank 0: those of others go unseen."""
    return Change("clipping.nonfinite_samples", "refuse", "if bool(counts.any()):", "if bool(counts[0]):")


@mechanism("https://github.com/hpcaitech/ColossalAI/pull/1175", "hang")
def overflowed_rank_leaves_the_norm() -> Change:
    """A rank whose gradients have overflowed does not take part in the all-reduce of the norm."""
    return Change(
        "clipping.clip_factors",
        "global_squared_norm",
        "return collectives.all_reduce_sum(GLOBAL_NORM, total, model.axis)",
        "return collectives.all_reduce_sum(GLOBAL_NORM, total, model.axis) if bool(total.isfinite()) else total",
    )


@mechanism("https://github.com/facebookresearch/fairscale/pull/851", "output")
def root_is_never_gathered_again() -> Change:
    """A flag says that whole parameters are there, though their shards have been updated since."""
    return Change(
        "sharding.flat_model", "ShardedModel.reshard", "for unit in self.units:", "for unit in self.units[1:]:"
    )
