"""Mechanisms of norms and clipping: of the one global norm, and of samples."""

from __future__ import annotations

from tests.mechanisms.planting import Change, Collection

found = Collection("norms and clipping")
mechanism = found.mechanism


@mechanism("https://github.com/facebookresearch/lingua/pull/59", "gradient (reduced)")
def clipped_each_micro_batch() -> Change:
    """The global norm is clipped after each micro-batch, and not once before the optimizer's step."""
    return Change(
        "trainer",
        "Trainer.micro_step",
        "self.model.reduce_gradients()",
        "self.model.reduce_gradients(), self.options.max_grad_norm and clip_factors.clip_global_norm("
        "self.model, self.options.max_grad_norm)",
    )


@mechanism("https://github.com/deepspeedai/DeepSpeed/issues/8475", "global norm")
def norms_of_ranks_averaged() -> Change:
    """The squared norms of ranks' own shards are averaged as if they were copies, and not added up."""
    return Change("clipping.clip_factors", "global_squared_norm", "all_reduce_sum", "all_reduce_average")


@mechanism("https://github.com/NVIDIA/Megatron-LM/pull/6164", "global norm")
def tied_counted_by_name() -> Change:
    """Parameters are collected by name: a tied one has several entries, which lie, count and are normed apart."""
    return Change(
        "sharding.parameter_slots",
        "shared_slots",
        "places.setdefault(id(parameter), [])",
        "places.setdefault(name, [])",
    )


@mechanism("https://github.com/huggingface/pytorch-image-models/pull/2790", "clip factor")
def clipped_the_wrong_way() -> Change:
    """Clipping is turned round: what is too long stays, and what is short is scaled up to the bound."""
    return Change("clipping.clip_factors", "global_factor", "max=1.0", "min=1.0")


@mechanism("https://github.com/pytorch/pytorch/issues/87401", "global norm")
def norm_not_returned() -> Change:
    """Clipping works and returns nothing in place of the norm."""
    return Change("clipping.clip_factors", "clip_global_norm", "return norm", "return None")


@mechanism("https://github.com/meta-pytorch/opacus/pull/451", "per-sample norm", stated=False)
def odd_padding_before() -> Change:
    """Of "same" padding with an odd total the odd one is put before the input; the layer puts it behind."""
    return Change("norms.conv", "_padding", "(total // 2, total - total // 2)", "(total - total // 2, total // 2)")


@mechanism("https://github.com/meta-pytorch/opacus/issues/137", "exception")
def dilation_left_out() -> Change:
    """The input is cut into patches as if the kernel had no dilation: they do not fit the positions of the output."""
    return Change(
        "norms.conv",
        "patches",
        "x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]",
        "x = x.unfold(axis, kernel, stride)",
    )


@mechanism("https://github.com/pytorch/executorch/pull/18455", "per-sample norm", stated=False)
def groups_as_if_depthwise() -> Change:
    """Channels are put into the order that holds for depthwise convolutions, in all grouped ones."""
    return Change(
        "norms.conv",
        "by_group",
        "module.groups, g.shape[1] // module.groups, g.shape[2:].numel())",
        "g.shape[1] // module.groups, module.groups, g.shape[2:].numel()).transpose(1, 2)",
    )


@mechanism("https://github.com/pytorch/pytorch/issues/191965", "per-sample norm")
def mean_over_those_left_out() -> Change:
    """A bag's mean divides by all of its places, also by those whose token is in no bag."""
    return Change("norms.embedding_bag", "by_mode", "counted(module, tokens_BT)", "torch.ones_like(tokens_BT)")


@mechanism("https://github.com/pytorch/pytorch/issues/3506", "per-sample norm")
def padding_row_has_a_gradient() -> Change:
    """``padding_idx`` is not looked at in one of the ways that gradients are formed: its row has one there."""
    return Change(
        "norms.embedding",
        "without_padding",
        "return g_BTp.masked_fill((tokens_BT == module.padding_idx).unsqueeze(-1), 0)",
        "return g_BTp",
    )


@mechanism("https://github.com/meta-pytorch/opacus/pull/825", "per-sample norm")
def heads_spliced_into_positions() -> Change:
    """What heads give is put together without turning heads and positions round: heads land in other positions."""
    return Change(
        "norms.multihead_attention",
        "_mixed",
        "is_causal=causal).transpose(1, 2).flatten(2)",
        "is_causal=causal).reshape(q_BTe.shape)",
    )


@mechanism("https://github.com/paiml/aprender/pull/1606", "per-sample norm")
def eps_of_another_model() -> Change:
    """The normalisation takes a constant in place of the layer's own eps."""
    return Change("norms.rms_norm", "normalised", "module.eps)", "1e-5)")


@mechanism("https://github.com/meta-pytorch/opacus/issues/502", "exception", stated=False)
def unused_layer_raises() -> Change:
    """A layer that ran and whose output no loss depends on is asked for its backprop all the same."""
    return Change(
        "clipping.recorder",
        "Recorder._backward",
        "[arrivals[position] for position in group if position in arrivals]",
        "[arrivals[position] for position in group]",
    )


@mechanism("https://github.com/galilai-group/stable-pretraining/pull/415", "per-sample norm")
def sum_over_ranks_discarded() -> Change:
    """The collective is called, and what it returns is dropped: the rank goes on with its own part."""
    return Change(
        "clipping.norm_aggregation",
        "sum_over",
        "return collectives.all_reduce_sum(NORMS, partial.clone(), axis)",
        "return (collectives.all_reduce_sum(NORMS, partial.clone(), axis), partial)[1]",
    )


@mechanism("https://github.com/verl-project/verl/issues/2185", "per-sample norm")
def values_stay_unsorted() -> Change:
    """Indices are brought into the order of the data set, and the values that belong to them are not."""
    return Change("clipping.norm_aggregation", "in_dataset_order", "values[order]", "values")


@mechanism("https://github.com/Lightning-AI/pytorch-lightning/issues/20803", "exception")
def bias_taken_for_granted() -> Change:
    """A LayerNorm made with ``bias=False`` has None there, and an attribute of it is asked for."""
    return Change(
        "norms.layer_norm",
        "_summands",
        "module.bias is not None and module.bias.requires_grad",
        "module.bias.requires_grad",
    )


@mechanism("https://github.com/meta-pytorch/opacus/pull/87", "exception", stated=False)
def evaluation_recorded() -> Change:
    """What a forward between two steps has recorded, for evaluation, is taken for a part of the next step."""
    return Change("clipping.private_backward", "PrivateBackward.begin", "self.forget()", "self._waiting = []")


@mechanism("https://github.com/triton-lang/triton/issues/1760", "per-sample norm", stated=False)
def last_tile_left_out() -> Change:
    """Where a size is no multiple of the tile's, the tile at the end is never computed."""
    return Change(
        "kernels.triton_norms",
        "direct_partials",
        "-(-p // tiles.rows) * -(-d // tiles.columns)",
        "max(1, p // tiles.rows) * max(1, d // tiles.columns)",
    )
