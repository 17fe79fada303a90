"""Planted bugs of norm kernels: terms that are missing, bits that are missing, memory that is not theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from ._fault import Function, Hit, fault


@fault(
    "kernels:direct_squared_norm",
    "the sum over positions squared term by term, https://github.com/meta-pytorch/opacus/pull/751",
    "kernels.definition",
    cause="each position is squared by itself",
)
def positions_squared_one_by_one(original: Function, hit: Hit) -> Function:
    """Each position's share of the gradient is squared by itself, so that cross terms are missing."""

    def planted(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        hit()
        own_BT = a_BTd.double().square().sum(2) * g_BTp.double().square().sum(2)
        return own_BT.sum(1).to(original(a_BTd, g_BTp).dtype)

    return planted


@fault(
    "kernels:half_gram_squared_norm",
    "norms summed in half precision, https://github.com/facebookresearch/fairscale/issues/1092",
    "kernels.bounded",
    cause="norm is rounded to 8 bits, the precision of bfloat16",
)
def norms_in_bfloat16(original: Function, hit: Hit) -> Function:
    """Norms are rounded to bfloat16."""

    def planted(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        hit()
        whole: Tensor = original(a_BTd, g_BTp)
        return whole.to(torch.bfloat16).to(whole.dtype)

    return planted


@fault(
    "kernels:direct_squared_norm",
    "sums in the order in which programs end (atomics), https://github.com/NVIDIA/Megatron-LM/issues/657",
    "kernels.order",
    cause="a call changes what the next one computes",
)
def summed_in_another_order_each_time(original: Function, hit: Hit) -> Function:
    """Every second call sums over positions and features in the opposite order."""
    calls = [0]

    def planted(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] % 2:
            hit()
            a_BTd, g_BTp = a_BTd.flip(1, 2), g_BTp.flip(1, 2)
        norms: Tensor = original(a_BTd, g_BTp)
        return norms

    return planted


@fault(
    "kernels:bmm_squared_norm",
    "memory that is used while another still writes to it, https://github.com/NVIDIA/Megatron-LM/issues/5788",
    "kernels.memory",
    cause="it writes to backprops",
)
def backprops_cleared(original: Function, hit: Hit) -> Function:
    """The first position of the backprops is cleared once their norm is known."""

    def planted(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        norms: Tensor = original(a_BTd, g_BTp)
        if g_BTp.numel():
            hit()
            g_BTp[:, :1].zero_()
        return norms

    return planted


@fault(
    "kernels:half_gram_squared_norm",
    "NaN turned into a number, https://github.com/facebookresearch/habitat-lab/issues/2226",
    "kernels.spoiled",
    cause="a number takes the place of",
)
def spoiled_norm_is_zero(original: Function, hit: Hit) -> Function:
    """A norm that is not finite becomes 0, as a clamp by maximum(0, NaN) makes it on some devices."""

    def planted(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        norms: Tensor = original(a_BTd, g_BTp)
        if not bool(norms.isfinite().all()):
            hit()
        return torch.where(norms.isfinite(), norms, 0.0)

    return planted
