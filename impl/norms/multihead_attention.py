"""nn.MultiheadAttention, as a whole: it multiplies with its projections' weights itself, so no inner layer ever runs.

Its forward is run again under torch.func (``fallback``), for all of its parameters: in_proj_*, q/k/v_proj_weight,
bias_k, bias_v and out_proj.*. An attention whose projections are layers of their own needs nothing of this.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import _terms, fallback
from .fallback import Call

LAYER = nn.MultiheadAttention
NEEDS_PARAMETERS = True
COVERS_CHILDREN = True
_ARGUMENTS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
"""Names of the arguments behind query, key and value, in order."""


def refusal(module: nn.MultiheadAttention) -> str:
    """Options under which rows of the input are not samples, or the layer is random."""
    if not module.batch_first:
        return "its first axis is positions, not samples: use batch_first=True"
    return fallback.refusal(module)


def call(positional: tuple[object, ...], keywords: dict[str, object]) -> Call:
    """The call with everything behind query, key and value named; ``attn_mask`` [T, S] is the same for all samples."""
    named = {**dict(zip(_ARGUMENTS, positional[3:], strict=False)), **keywords}
    mask = named.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise NotImplementedError("a MultiheadAttention with a mask for each sample: give one [T, S] for all samples")
    return Call(positional[:3], named, shared=("attn_mask",))


def squared_norm(module: nn.MultiheadAttention, activations: Tensor | Call, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over all trainable parameters."""
    return _terms.squares(per_sample_gradient(module, activations, backprops), backprops)


def per_sample_gradient(
    module: nn.MultiheadAttention, activations: Tensor | Call, backprops: Tensor
) -> dict[str, Tensor]:
    """{dotted name: [B, *shape]} of all trainable parameters."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
        return fallback.gradients_of(module, _trainable(module), activations, backprops)


def weighted_gradient(
    module: nn.MultiheadAttention, activations: Tensor | Call, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{dotted name: [*shape]} of all trainable parameters."""
    return fallback.weighted_gradients_of(module, _trainable(module), activations, backprops, weights_B)


def _trainable(module: nn.MultiheadAttention) -> list[str]:
    return [name for name, value in module.named_parameters() if value.requires_grad]
