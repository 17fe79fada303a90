"""One-line faults in Opacus 1.6.0, in code that the adapters ``opacus`` and ``opacus_ddp`` reach.

Frozen: chosen before any test or law was asked of them. What each stands for is a planted fault of the reference
(``fsdpcheck list faults``), a mechanism of a public report (tests/mechanisms) or the report itself.
"""

from __future__ import annotations

from functools import partial

from tests.mechanisms.planting import Change, Collection

found = Collection("opacus")
_Change = partial(Change, package="opacus")
_FSDP = "optimizers.fsdpoptimizer_fast_gradient_clipping"
_DDP_GHOST = "optimizers.ddpoptimizer_fast_gradient_clipping"
_SAMPLES = "opacus:sound"
_HOOKS = "opacus_ddp"
_GHOST = "opacus_ddp:ghost"


@found.mechanism("meta-pytorch/opacus#280", "gradient (reduced)", adapter=_SAMPLES)
def normaliser_of_all_ranks() -> Change:
    """The expected batch is that of all ranks, and the average over ranks divides once more."""
    return _Change(
        "privacy_engine",
        "PrivacyEngine.make_private",
        "expected_batch_size /= world_size",
        "expected_batch_size /= 1",
    )


@found.mechanism("meta-pytorch/opacus#761", "noise", adapter=_SAMPLES)
def noise_not_shared_among_ranks() -> Change:
    """Noise is of the size of the sum over ranks, the gradient of the size of their average."""
    return _Change(_FSDP, "FSDPOptimizerFastGradientClipping.add_noise", "div_(self.world_size)", "div_(1)")


@found.mechanism("google-deepmind/jax_privacy#338", "noise", adapter=_SAMPLES)
def noise_without_the_clip_norm() -> Change:
    """The standard deviation is the noise multiplier, whatever the clip norm is."""
    return _Change(
        _FSDP,
        "FSDPOptimizerFastGradientClipping.add_noise",
        "self.noise_multiplier * self.max_grad_norm",
        "self.noise_multiplier",
    )


@found.mechanism("allenai/open-instruct#1498", "gradient (reduced)", adapter=_SAMPLES)
def sum_overwritten() -> Change:
    """Of the micro-batches of a step the last one alone survives."""
    return _Change(
        _FSDP,
        "FSDPOptimizerFastGradientClipping.accumulate",
        '["summed_grad"].add_(p.grad.data)',
        '["summed_grad"].copy_(p.grad.data)',
    )


@found.mechanism("planted: local_gradients_survive_their_reduction", "gradient (reduced)", adapter=_SAMPLES)
def sum_outlives_its_step() -> Change:
    """Once a step had several micro-batches, sums are not dropped any more: later steps have them again."""
    return _Change(
        _FSDP,
        "FSDPOptimizerFastGradientClipping.pre_step",
        "self._is_last_step_skipped = False",
        "self._is_last_step_skipped = self._is_last_step_skipped",
    )


@found.mechanism("planted: draws_keyed_by_rank; mechanism: seed_not_passed_on", "noise", adapter=_SAMPLES)
def generator_left_out() -> Change:
    """Noise comes from the generator of the process, not from the one that was given."""
    return _Change(
        "optimizers.optimizer",
        "_generate_noise",
        "generator=generator,\n            dtype",
        "generator=None,\n            dtype",
    )


@found.mechanism("mechanism: clipped_the_wrong_way", "clip factor", adapter=_SAMPLES)
def small_samples_scaled_up() -> Change:
    """Factors are one at least, where they should be one at most."""
    return _Change(
        "grad_sample.grad_sample_module_fast_gradient_clipping",
        "GradSampleHooksFastGradientClipping.get_clipping_coef",
        "clamp(max=1.0)",
        "clamp(min=1.0)",
    )


@found.mechanism("meta-pytorch/opacus#751", "per-sample norm", adapter=_SAMPLES)
def bias_gram_entries_squared() -> Change:
    """The norm of a bias sums the squares of the Gram matrix's entries instead of the entries."""
    return _Change(
        "grad_sample.linear",
        "compute_linear_norm_sample",
        'torch.einsum("n...i->n", ggT)',
        'torch.einsum("n...i,n...i->n", ggT, ggT)',
    )


@found.mechanism("planted: gram_without_cross_terms", "per-sample norm", adapter=_SAMPLES)
def gram_without_cross_terms() -> Change:
    """Of a sequence's two Gram matrices the diagonals alone count in the norm of a weight."""
    return _Change(
        "grad_sample.linear",
        "compute_linear_norm_sample",
        'torch.einsum("n...i,n...i->n", ggT, aaT)',
        'torch.einsum("nii,nii->n", ggT, aaT)',
    )


@found.mechanism("planted: embedding_rows_not_merged", "per-sample norm", adapter=_SAMPLES)
def embedding_rows_not_merged() -> Change:
    """A token that occurs twice in a sample counts as two rows in the norm of an Embedding."""
    return _Change(
        "grad_sample.embedding_norm_sample",
        "compute_embedding_norm_sample",
        "sqr_gradient_sum = torch.sum(summed_gradients**2, dim=1)",
        "sqr_gradient_sum = torch.zeros_like(summed_gradients[:, 0]).index_add("
        "0, new_index_positions, torch.sum(grad_values**2, dim=1))",
    )


@found.mechanism("meta-pytorch/opacus#734; planted: first_backward_leaks", "gradient (local)", adapter=_SAMPLES)
def first_backward_leaks() -> Change:
    """The gradients of the first, unclipped backward stay, and the second backward adds to them."""
    return _Change(
        "utils.fast_gradient_clipping_utils",
        "DPTensorFastGradientClipping.backward",
        "self.optimizer.zero_grad()",
        "pass",
    )


@found.mechanism("planted: local_means", "gradient (local)", adapter=_SAMPLES)
def second_loss_averaged() -> Change:
    """The re-weighted losses are averaged over the rank's own samples, and divided by the expected batch again."""
    return _Change(
        "utils.fast_gradient_clipping_utils",
        "DPTensorFastGradientClipping.backward",
        "torch.sum(second_loss_per_sample)",
        "torch.mean(second_loss_per_sample)",
    )


@found.mechanism("ml-explore/mlx-lm#1413", "per-sample norm", adapter=_SAMPLES)
def mean_not_undone() -> Change:
    """Norms are those of losses divided by the samples of the rank: too small, so that too little is clipped."""
    return _Change(
        "grad_sample.grad_sample_module",
        "GradSampleHooks.rearrange_grad_samples",
        "backprops = backprops * n",
        "backprops = backprops * 1",
    )


@found.mechanism("meta-pytorch/opacus#444; planted: ranks_draw_one_stream", "sample draw", adapter=_SAMPLES)
def every_rank_has_the_first_share() -> Change:
    """Every rank draws from the records of the first rank."""
    return _Change(
        "utils.uniform_sampler",
        "DistributedUniformWithReplacementSampler.__iter__",
        "indices[self.rank :",
        "indices[0 :",
    )


@found.mechanism("planted: epoch_never_told", "sample draw", adapter=_SAMPLES)
def epoch_left_out_of_the_seed() -> Change:
    """Records are dealt out to the ranks in the same way in all epochs."""
    return _Change(
        "utils.uniform_sampler",
        "DistributedUniformWithReplacementSampler.__iter__",
        "self.shuffle_seed + self.epoch",
        "self.shuffle_seed",
    )


@found.mechanism("meta-pytorch/opacus#779", "noise", adapter=_SAMPLES)
def accountant_told_the_standard_deviation() -> Change:
    """The standard deviation of the noise is reported to the accountant, not the multiplier."""
    return _Change(
        "accountants.accountant",
        "IAccountant.get_optimizer_hook_fn",
        "noise_multiplier=optim.noise_multiplier,",
        "noise_multiplier=optim.noise_multiplier * optim.max_grad_norm,",
    )


@found.mechanism("meta-pytorch/opacus#429; planted: ledger_begins_again", "noise", adapter=_SAMPLES)
def steps_alike_counted_once() -> Change:
    """However many steps were taken alike, the accountant knows one."""
    return _Change("accountants.prv", "PRVAccountant.step", "num_steps + 1", "num_steps")


@found.mechanism("meta-pytorch/opacus#242", "per-sample norm", adapter=_HOOKS)
def bias_of_the_first_position() -> Change:
    """The gradient of a bias is that of a sequence's first position, not the sum over positions."""
    return _Change(
        "grad_sample.linear",
        "compute_linear_grad_sample",
        'torch.einsum("n...k->nk", backprops)',
        "backprops.reshape(len(backprops), -1, backprops.shape[-1])[:, 0]",
    )


@found.mechanism("meta-pytorch/opacus#324; planted: summed_not_averaged", "gradient (reduced)", adapter=_GHOST)
def not_averaged_over_ranks() -> Change:
    """Gradients are summed over the ranks, and not divided by their number."""
    return _Change(
        _DDP_GHOST,
        "DistributedDPOptimizerFastGradientClipping.reduce_gradients",
        "p.grad /= self.world_size",
        "p.grad /= 1",
    )


@found.mechanism("fedbiomed/fedbiomed#1443; planted: clipped_unit_by_unit", "per-sample norm", adapter=_HOOKS)
def norm_of_the_largest_parameter() -> Change:
    """A sample's norm is the largest of its parameters' norms."""
    return _Change(
        "optimizers.optimizer",
        "DPOptimizer.clip_and_accumulate",
        "torch.stack(per_param_norms, dim=1).norm(2, dim=1)",
        "torch.stack(per_param_norms, dim=1).amax(dim=1)",
    )


@found.mechanism("meta-pytorch/opacus#707", "gradient (reduced)", adapter=_GHOST)
def sum_is_the_gradient_itself() -> Change:
    """The sum that is kept over micro-batches is the very tensor into which the next backward adds."""
    return _Change(
        "optimizers.optimizer_fast_gradient_clipping",
        "DPOptimizerFastGradientClipping.accumulate",
        "copy.deepcopy(p.grad.data)",
        "p.grad.data",
    )


@found.mechanism("meta-pytorch/opacus#166; fedbiomed/fedbiomed#1443", "noise", adapter=_HOOKS)
def noise_on_every_rank() -> Change:
    """Every rank adds the noise that one is to add, and the sum has as many draws as there are ranks."""
    return _Change("optimizers.ddpoptimizer", "DistributedDPOptimizer.add_noise", "self.rank == 0", "self.rank >= 0")


@found.mechanism("meta-pytorch/opacus#196; pytorch/torchtitan#166", "parameter after step", adapter=_HOOKS)
def initial_values_not_sent() -> Change:
    """Each rank starts from the values that it has built itself."""
    return _Change(
        "distributed",
        "DifferentiallyPrivateDistributedDataParallel.__init__",
        "torch.distributed.broadcast(p.data, 0)",
        "pass",
    )


@found.mechanism("planted: rms_norm_of_raw_inputs", "per-sample norm", adapter=_SAMPLES)
def rms_norm_of_raw_inputs() -> Change:
    """The gradient of an RMSNorm's weight multiplies backprops with the input as it came."""
    return _Change(
        "grad_sample.rms_norm",
        "compute_rms_norm_grad_sample",
        "F.rms_norm(activations, layer.normalized_shape, eps=layer.eps) * backprops",
        "activations * backprops",
    )
