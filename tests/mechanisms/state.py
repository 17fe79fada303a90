"""Mechanisms of state: what is saved, loaded, and made the same on all ranks at the start."""

from __future__ import annotations

from tests.mechanisms.planting import Change, Collection

found = Collection("state and initial values")
mechanism = found.mechanism


@mechanism("https://github.com/NVIDIA/Megatron-LM/pull/5976", "optimizer state")
def step_counted_that_was_none() -> Change:
    """The step that only makes room for the state is counted: the bias correction is that of a later step."""
    return Change(
        "state.optimizer_state",
        "prepare",
        "_own(value, shard, options)",
        '_own(value + 1 if name == "step" else value, shard, options)',
    )


@mechanism("https://github.com/facebookresearch/fairscale/issues/1083", "exception")
def step_counter_becomes_a_number() -> Change:
    """Adam's step counter is saved as a number, and comes back as one where a tensor is needed."""
    return Change(
        "state.optimizer_state", "_scalar", "return value.detach().cpu().clone()", "return value.detach().item()"
    )


@mechanism("https://github.com/pytorch/pytorch/issues/129079", "optimizer state")
def learning_rate_not_loaded() -> Change:
    """Tensors are loaded in place, the learning rate is not: the first steps have that of a new optimizer."""
    return Change(
        "state.optimizer_state",
        "Prepared.take_over",
        "group.update(options)",
        'group.update({option: value for option, value in options.items() if option != "lr"})',
    )


@mechanism("https://github.com/pytorch/pytorch/issues/143828", "checkpoint", stated=False)
def options_of_the_first_group() -> Change:
    """Of several parameter groups only the first one's options are saved, and stand for all."""
    return Change(
        "state.optimizer_state",
        "describe",
        "found.hyperparameters[name] = dict(options)",
        "found.hyperparameters[name] = dict(next(iter(found.hyperparameters.values()), options))",
    )


@mechanism("https://github.com/pytorch/pytorch/issues/117421", "output")
def loaded_beside_gathered_parameters() -> Change:
    """A state dict is loaded into shards while parameters are gathered, and the gathered ones stay as they were."""
    return Change("state", "load", "model.reshard()", "model.module")


@mechanism(
    "https://github.com/pytorch/pytorch/pull/79400",
    "checkpoint",
    shown=False,
    why="torch.distributed.checkpoint of torch 2.13 copies a view before it writes it: files are the same",
)
def whole_storage_saved() -> Change:
    """A view is handed to ``torch.save``, which writes the whole storage behind it."""
    return Change(
        "state.planners", "SpanWriter.resolve_data", "self._views[write_item.index].clone()",
        "self._views[write_item.index]",
    )  # fmt: skip


@mechanism("https://github.com/radixark/Megatron-LM/pull/90", "exception", stated=False)
def shard_without_parameters_has_no_state() -> Change:
    """A rank whose shard is all padding leaves it out of its optimizer, and has no state to save that others have."""
    return Change(
        "sharding.flat_model",
        "ShardedModel.shards",
        "if unit.trainable is not None",
        "if unit.trainable is not None and unit.trainable.real > 0",
    )


@mechanism("https://github.com/hiyouga/LlamaFactory/pull/10820", "output")
def buffers_that_are_not_saved_not_sent() -> Change:
    """Buffers that no state dict has keep on other ranks what these have built, such as frequencies of positions."""
    return Change(
        "sharding.initial_sync",
        "sync_buffers",
        "(buffer for buffer in module.buffers() if not buffer.is_meta)",
        "(buffer for name, buffer in module.named_buffers() if name in module.state_dict() and not buffer.is_meta)",
    )


@mechanism("https://github.com/pytorch/pytorch/pull/178569", "output")
def buffers_of_other_replicas_left() -> Change:
    """Buffers are marked as sent after the first of two broadcasts, and left out of that over the replicas."""
    return Change(
        "sharding.initial_sync",
        "sync_buffers",
        '_broadcast(Subject("(buffers)"), held, shards, replicas)',
        '_broadcast(Subject("(buffers)"), held, shards, collectives.ALONE)',
    )


@mechanism("https://github.com/meta-pytorch/torchrec/pull/4601", "exception")
def sent_from_a_global_rank() -> Change:
    """The first rank of a group is named by its number in the group, where its number among all ranks is asked for."""
    return Change("sharding.collectives", "broadcast", "group_src=0", "src=0")


@mechanism("https://github.com/vllm-project/vllm/pull/2530", "exception", adapter="")
def gathered_on_a_global_rank() -> Change:
    """As sent_from_a_global_rank, of the rank that whole tensors are gathered on."""
    return Change("sharding.collectives", "gather", "group_dst=0", "dst=0")
