"""One-line faults in ``fully_shard`` of torch 2.13.0 and in what clips its gradients, in code that the adapter reaches.

Frozen: chosen before any test or law was asked of them. What each stands for is a planted fault of the reference
(``fsdpcheck list faults``), a mechanism of a public report (tests/mechanisms) or the report itself.
"""

from __future__ import annotations

from functools import partial

from tests.mechanisms.planting import Change, Collection

found = Collection("fully_shard")
_Change = partial(Change, package="torch.distributed.fsdp._fully_shard")
_mechanism = partial(found.mechanism, adapter="fully_shard")


@_mechanism("NVIDIA/Megatron-LM#5077; planted: shard_starts_rounded_down", "parameter after step")
def shard_of_the_next_rank() -> Change:
    """Each rank takes the shard of the rank behind it."""
    return _Change(
        "_fsdp_param",
        "FSDPParam._init_sharded_param",
        "chunks[shard_rank]",
        "chunks[(shard_rank + 1) % shard_world_size]",
    )


@_mechanism("mechanism: count_no_multiple_of_ranks", "exception")
def padded_size_rounded_down() -> Change:
    """The padded size of a gradient is rounded down to a multiple of the ranks."""
    return _Change("_fsdp_common", "_get_dim0_padded_size", "math.ceil(", "math.floor(")


@_mechanism("NVIDIA/Megatron-LM#5077", "gradient (reduced)")
def offsets_without_padding() -> Change:
    """Reduced gradients are read at offsets that leave out the padding which lies between them."""
    return _Change(
        "_fsdp_collectives",
        "foreach_reduce",
        "flat_grad_offset += padded_sharded_numel",
        "flat_grad_offset += fsdp_param.sharded_size.numel()",
    )


@_mechanism("planted: reduced_gradient_overwritten", "gradient (reduced)")
def reduced_gradient_overwritten() -> Change:
    """With a reduction after every micro-batch, each replaces the one before."""
    return _Change(
        "_fsdp_collectives",
        "foreach_reduce",
        "grad._local_tensor += new_sharded_grad",
        "grad._local_tensor = new_sharded_grad",
    )


@_mechanism("pytorch/pytorch#154888", "gradient (reduced)")
def replicas_of_single_shards() -> Change:
    """Where a replica is one shard, the all-reduce over replicas is left out."""
    return _Change(
        "_fsdp_collectives",
        "foreach_reduce",
        "if all_reduce_group is not None:",
        "if all_reduce_group is not None and world_size > 1:",
    )


@_mechanism("pytorch/pytorch#155903; planted: replicas_summed_not_averaged", "gradient (reduced)")
def replicas_summed_not_averaged() -> Change:
    """Gradients are divided by the number of shards, but not by the number of replicas."""
    return _Change(
        "_fsdp_collectives",
        "_get_gradient_divide_factors",
        "data_parallel_size *= all_reduce_group.size()",
        "data_parallel_size *= 1",
    )


@_mechanism("facebookresearch/fairscale#565", "gradient (reduced)")
def divided_by_the_wrong_rest() -> Change:
    """Behind the sum gradients are divided by one over the factor that was used before it."""
    return _Change(
        "_fsdp_collectives", "_get_gradient_divide_factors", "post_factor = factor / pre_factor",
        "post_factor = 1 / pre_factor",
    )  # fmt: skip


@_mechanism("NVIDIA/Megatron-LM#7186; pytorch/pytorch#73535", "gradient (reduced)")
def partial_sum_dropped() -> Change:
    """Of micro-batches that wait for the all-reduce over replicas the last one alone is kept."""
    return _Change(
        "_fsdp_collectives",
        "foreach_reduce",
        "partial_reduce_output += reduce_output",
        "partial_reduce_output = reduce_output",
    )


@_mechanism("planted: local_gradients_survive_their_reduction", "gradient (reduced)")
def local_gradients_survive() -> Change:
    """A local gradient stays when it has been reduced, and the next reduction counts it again."""
    return _Change(
        "_fsdp_param_group",
        "FSDPParamGroup.post_backward",
        "fsdp_param.unsharded_param.grad = None",
        "pass",
    )


@_mechanism("NVIDIA/cosmos-framework#161", "collective")
def gradient_sync_never_off() -> Change:
    """Every micro-batch is reduced, whatever is asked: the numbers are right, and much more is sent."""
    return _Change(
        "_fully_shard",
        "FSDPModule.set_requires_gradient_sync",
        "fsdp_param_group.reduce_grads = requires_gradient_sync",
        "fsdp_param_group.reduce_grads = True",
    )


@_mechanism("planted: all_reduce_never_on_again", "gradient (reduced)")
def all_reduce_never_on_again() -> Change:
    """Once the all-reduce over replicas is off, it stays off."""
    return _Change(
        "_fully_shard",
        "FSDPModule.set_requires_all_reduce",
        "fsdp_param_group.all_reduce_grads = requires_all_reduce",
        "fsdp_param_group.all_reduce_grads &= requires_all_reduce",
    )


@_mechanism("planted: units_never_resharded", "parameter after step")
def units_never_resharded() -> Change:
    """Gathered parameters are never freed, so later steps compute with the first step's values."""
    return _Change("_fsdp_param_group", "FSDPParamGroup.reshard", "self._to_sharded()", "pass")


@_mechanism("planted: nothing_freed_after_a_step; mechanism: frozen_units_stay_gathered", "memory")
def gathered_memory_kept() -> Change:
    """The memory of gathered parameters is not given back: the numbers are right."""
    return _Change("_fsdp_param", "FSDPParam.free_unsharded_param", "free_storage(tensor)", "pass")


@_mechanism("pytorch/pytorch#105371; planted: thawed_parameters_stay_frozen", "parameter after step")
def thawed_parameters_stay_frozen() -> Change:
    """Whether a parameter is trained is what it was at the first gather."""
    return _Change(
        "_fsdp_param",
        "FSDPParam.to_unsharded",
        "set_requires_grad_if_needed(self.sharded_param, self._unsharded_param)",
        "pass",
    )


@_mechanism("pytorch/pytorch#117421", "output")
def loaded_beside_gathered_parameters() -> Change:
    """A state dict is taken and loaded while parameters are gathered."""
    return _Change("_fsdp_param_group", "FSDPParamGroup._register_state_dict_hooks", "self._to_sharded()", "pass")


@_mechanism("pytorch/pytorch#190626", "gradient (reduced)")
def reduced_in_the_compute_dtype() -> Change:
    """Gradients travel and are summed in the dtype that they have, where the policy asks for a wider one."""
    return _Change(
        "_fsdp_collectives",
        "foreach_reduce",
        "reduce_dtype = reduce_dtype or grad_dtype",
        "reduce_dtype = grad_dtype",
    )


@_mechanism("planted: a_weight_of_two_units_is_untied", "output")
def second_use_of_a_weight_left_out() -> Change:
    """Where two layers share a weight, the second keeps what it had when the model was sharded."""
    return _Change(
        "_fsdp_param",
        "FSDPParam._setattr_on_modules",
        "unsafe_setattr_param(shared_module, shared_param_name, param)",
        "pass",
    )


@_mechanism("planted: sharded_by_rows_anyway", "gradient (reduced)")
def columns_reduced_as_rows() -> Change:
    """The gradient of a parameter that is sharded by columns is reduced row by row."""
    return _Change(
        "_fsdp_collectives",
        "foreach_reduce",
        "unsharded_grads[i] = torch.cat(chunks, dim=0)",
        "unsharded_grads[i] = unsharded_grad",
    )


@_mechanism("pytorch/pytorch#98281; planted: ignored_parameter_sharded", "parameter after step")
def ignored_parameter_sharded() -> Change:
    """A parameter that is to be left alone is sharded and reduced like the others."""
    return _Change(
        "_fsdp_init",
        "_get_managed_states",
        "if param in ignored_params:",
        "if param in visited_params:",
    )


@_mechanism("areal-project/AReaL#312; planted: global_norm_of_own_shard", "global norm")
def norms_added_without_their_squares() -> Change:
    """The norms of shards are added over the ranks as they are, where their squares should be."""
    return Change(
        "_math_ops",
        "_NormPartial._pre_reduce_transform",
        "tensor**self.norm_type",
        "tensor",
        "torch.distributed.tensor._ops",
    )


@_mechanism("planted: factors_from_squared_norms", "clip factor")
def clipped_by_the_squared_norm() -> Change:
    """The coefficient of clipping is that of the squared norm."""
    return Change(
        "clip_grad",
        "_clip_grads_with_norm_",
        "max_norm / (total_norm + 1e-6)",
        "max_norm / (total_norm**2 + 1e-6)",
        "torch.nn.utils",
    )


@_mechanism("meta-pytorch/torchrec#4268; planted: hook_on_a_shard_never_fires", "gradient (reduced)")
def hook_of_a_shard_never_called() -> Change:
    """A hook that is to run when the gradient of a sharded parameter has come is not called."""
    return _Change("_fsdp_collectives", "foreach_reduce", "hook(fsdp_param.sharded_param)", "pass")


@_mechanism("pytorch/pytorch#83129; planted: root_gradients_not_reduced", "gradient (reduced)")
def units_without_a_hook_not_reduced() -> Change:
    """A unit whose inputs have no gradient, as the first one, is not reduced at the end of the backward."""
    return _Change(
        "_fsdp_state",
        "FSDPState._root_post_backward_final_callback",
        "fsdp_param_group.post_backward()",
        "pass",
    )


@_mechanism("pytorch/pytorch#158719; planted: only_used_units_reduced", "hang")
def zero_gradients_not_reduced() -> Change:
    """A unit whose local gradients are all zero takes no part in its reduction."""
    return _Change(
        "_fsdp_param_group",
        "FSDPParamGroup.post_backward",
        "if len(fsdp_params_with_grad) == 0:",
        "if not any(grad.any() for grad in unsharded_grads):",
    )
