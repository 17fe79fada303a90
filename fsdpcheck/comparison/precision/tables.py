"""Tables of operators: by name, without ``_foreach_``, ``_copy`` and the ``_`` of what works in place."""

from __future__ import annotations

from typing import Final

_EXACT: Final = """
abs absolute adaptive_max_pool2d adaptive_max_pool3d alias amax amin _aminmax aminmax argsort as_strided
as_strided_scatter block_diag broadcast_to cat ceil channel_shuffle _chunk_cat clamp clamp_max clamp_min clone
coalesce _coalesced complex _conj _conj_physical conj_physical constant_pad_nd contiguous copysign cummax cummin
detach diag_embed diagonal diagonal_backward diagonal_scatter embedding expand flip floor fmax fmin fmod frac
fractional_max_pool2d fractional_max_pool3d frexp gather hardshrink hardshrink_backward hardtanh hardtanh_backward
heaviside im2col imag index index_fill index_put _index_put_impl index_select indices isin kthvalue lift
lift_fresh lu_unpack masked_fill masked_scatter masked_select max max_pool2d_with_indices max_pool3d_with_indices
max_unpool2d max_unpool3d maximum median min minimum mode movedim nan_to_num nanmedian narrow native_channel_shuffle
neg _neg_view negative permute pixel_shuffle pixel_unshuffle positive put real reflection_pad1d reflection_pad2d
reflection_pad3d relu repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape
_reshape_alias _reshape resize resize_as resolve_conj resolve_neg roll rot90 round scatter select
select_backward select_scatter set sgn sign slice slice_backward slice_scatter sort split split_with_sizes squeeze
stack t take threshold threshold_backward topk trace_backward transpose tril triu trunc unbind unfold _unique
_unique2 unique_consecutive unique_dim _unsafe_index _unsafe_index_put unsafe_split unsafe_split_with_sizes
_unsafe_view unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d _values values view view_as_complex view_as_real where
"""
_CONSTANT: Final = """
arange bartlett_window blackman_window _efficientzerotensor empty empty_like empty_permuted empty_strided eye fill
fill_diagonal from_file full full_like hamming_window hann_window kaiser_window linspace logspace new_empty
new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor tril_indices triu_indices zero zeros
zeros_like
"""
_DRAW: Final = """
alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout feature_dropout _fused_dropout
geometric log_normal multinomial native_dropout normal normal_functional poisson rand rand_like randint randint_like
randn randn_like random randperm rrelu_with_noise rrelu_with_noise_functional _sample_dirichlet _standard_gamma
uniform
"""
_REDUCTION: Final = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
adaptive_max_pool2d_backward adaptive_max_pool3d_backward addbmm addmm _addmm_activation addmv addr avg_pool2d
avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm binary_cross_entropy bmm _cdist_backward _cdist_forward
col2im _convolution convolution convolution_backward cumprod cumsum dist dot _embedding_bag _embedding_bag_backward
_embedding_bag_dense_backward _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
embedding_dense_backward _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _fused_rms_norm_backward glu_backward
grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward _grouped_mm huber_loss inner
linalg__powsum linalg_cross linalg_vecdot linalg_vector_norm linear linear_backward _log_softmax
_log_softmax_backward_data _logcumsumexp logcumsumexp logsumexp max_pool2d_with_indices_backward
max_pool3d_with_indices_backward mean mkldnn_convolution mkldnn_rnn_layer mm mse_loss multi_margin_loss
multilabel_margin_loss_forward mv nanmean nansum native_batch_norm_backward native_group_norm
native_group_norm_backward native_layer_norm native_layer_norm_backward native_norm nll_loss2d_forward
nll_loss_forward norm _pdist_backward _pdist_forward powsum prod reflection_pad1d_backward reflection_pad2d_backward
reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
_safe_softmax _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
segment_reduce _segment_reduce_backward _slow_conv2d_backward _slow_conv2d_forward slow_conv3d_forward
slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss soft_margin_loss
_softmax _softmax_backward_data std std_mean sum sum_to_size _thnn_fused_gru_cell _thnn_fused_lstm_cell trace
_trilinear unfold_backward _unsafe_masked_index_put_accumulate upsample_bicubic2d upsample_bicubic2d_backward
upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward
upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d
upsample_trilinear3d_backward var var_mean vdot _weight_norm_interface _weight_norm_interface_backward
"""

SCALER: Final = frozenset(("_amp_foreach_non_finite_check_and_unscale", "_amp_update_scale"))
"""What a GradScaler calls: it multiplies by powers of two, which is exact, and counts."""
EXACT: Final = SCALER | frozenset((*_EXACT.split(), "_local_scalar_dense"))
"""Values are moved or selected, or change their signs: what such an operator gives is the same number in every type."""
CAST: Final = frozenset(("_to_copy", "copy", "to", "_copy_from", "_copy_from_and_resize")) | frozenset(
    ("all_gather_copy_in", "chunk_cat", "split_with_sizes_copy")
)
"""They copy into a type. The last three are FSDP2's."""
CONSTANT: Final = frozenset(_CONSTANT.split())
"""They make values of arguments that are no tensors."""
DRAW: Final = frozenset(_DRAW.split())
"""They draw random numbers."""
_ALL: Final = (0, 1, 2, 3, 4, 5)
REDUCTION: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(_REDUCTION.split(), _ALL),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_with_update_functional", "native_batch_norm"), (0, 1, 2)),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_functional"), (0, 1, 2)),
    **dict.fromkeys(("index_add", "index_reduce", "scatter_add", "scatter_reduce"), (3,)),
}
"""They add terms or products up: the numbers of the arguments that have them. Those of running averages are written."""
ACCUMULATE: Final[dict[str, int]] = dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put", "put"), 3)
"""Exact ones, with the number of the argument that makes them add up."""
