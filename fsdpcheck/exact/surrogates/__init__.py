"""Grid surrogates: true non-linearities rounded to dyadic grids, in place of torch's kernels for the length of a run.

Forward is the true function, rounded and saturated; backward is linear in the cotangent with dyadic coefficients that
depend on what forward saved alone. So a model with LayerNorm, attention or GELU stays in exact arithmetic, and ghost
clipping, which runs backward again with re-weighted losses, still gets sum_i c_i g_i. Both sides of a comparison run
under the surrogates; they say nothing of torch's own kernels.

Kernels are replaced in torch's dispatcher, never functions or modules: registries of private-training libraries are
keyed by the exact module type, and hooks and norm rules that call torch see the same function. Registered and taken
out in about 0.1 ms. CPU, and CUDA where there is one. ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` have
a kernel of their own for evaluations, of true functions: it is not taken meanwhile.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch import library as dispatcher
from torch.backends import mha

from fsdpcheck.compat.torch_private import remove_kernels
from fsdpcheck.exact.surrogates import elementwise, grids, normalisation, softmax, spelled_out
from fsdpcheck.exact.surrogates.grid_rounding import doubts as doubts


@dispatcher.custom_op("fsdpcheck::rms_xhat", mutates_args=())
def _rms_xhat(x: Tensor, count: int, eps: float) -> Tensor:
    return normalisation.rms_xhat(x, count, eps)


@dispatcher.custom_op("fsdpcheck::rms_xhat_backward", mutates_args=())
def _rms_xhat_backward(grad: Tensor, x: Tensor, count: int, eps: float) -> Tensor:
    return normalisation.rms_xhat_backward(grad, x, count, eps)


def _save(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    x, ctx.count, ctx.eps = inputs
    ctx.save_for_backward(x)


def _pull_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    return _rms_xhat_backward(grad, x, ctx.count, ctx.eps), None, None


_rms_xhat.register_autograd(_pull_back, setup_context=_save)
_rms_xhat.register_fake(lambda x, count, eps: torch.empty_like(x))
_rms_xhat_backward.register_fake(lambda grad, x, count, eps: torch.empty_like(x))


@functools.cache
def _shard_rms_xhat() -> None:
    """Say where DTensor may shard what the two give: as their tensors, on dimensions that are not normalised."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    ops: Any = torch.ops.fsdpcheck

    def placements(*asked: Any) -> Any:
        *tensors, count, _ = asked
        outer = [dim for dim in range(tensors[0].ndim) if math.prod(tensors[0].shape[dim + 1 :]) >= count]
        return [([one], [*[one] * len(tensors), None, None]) for one in [Replicate(), *map(Shard, outer)]]

    register_sharding([ops.rms_xhat.default, ops.rms_xhat_backward.default])(placements)


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """aten::rms_norm"""
    xhat: Tensor = _rms_xhat(x, math.prod(shape), torch.finfo(x.dtype).eps if eps is None else eps)
    return xhat if weight is None else xhat * weight


_ELEMENTWISE = {
    "gelu": elementwise.gelu, "silu": elementwise.silu, "tanh": elementwise.tanh, "sigmoid": elementwise.sigmoid,
    "elu": elementwise.elu, "hardswish": elementwise.hardswish, "hardsigmoid": elementwise.hardsigmoid,
    "mish": elementwise.mish, "celu": elementwise.celu,
}  # fmt: skip
"""With variants that write over their input."""

KERNELS: Final[dict[str, Callable[..., Any]]] = {
    **_ELEMENTWISE,
    **{f"{name}_": elementwise.in_place(kernel) for name, kernel in _ELEMENTWISE.items()},
    **{f"{name}.out": elementwise.out_variant(kernel) for name, kernel in _ELEMENTWISE.items() if name != "celu"},
    "softplus": elementwise.softplus,
    "log_sigmoid_forward": elementwise.log_sigmoid,
    "gelu_backward": elementwise.gelu_backward,
    "silu_backward": elementwise.silu_backward,
    "elu_backward": elementwise.elu_backward,
    "softplus_backward": elementwise.softplus_backward,
    "mish_backward": elementwise.mish_backward,
    "hardswish_backward": elementwise.hardswish_backward,
    "hardsigmoid_backward": elementwise.hardsigmoid_backward,
    "log_sigmoid_backward": elementwise.log_sigmoid_backward,
    "_softmax": softmax.softmax,
    "_log_softmax": softmax.log_softmax,
    "_log_softmax_backward_data": softmax.log_softmax_backward,
    "native_layer_norm": normalisation.layer_norm,
    "native_layer_norm_backward": normalisation.layer_norm_backward,
    "native_group_norm": normalisation.group_norm,
    "native_group_norm_backward": normalisation.group_norm_backward,
}
"""Operators whose kernel is replaced, on each device."""

COMPOSITES: Final[dict[str, Callable[..., Any]]] = {
    "glu": elementwise.glu,
    "rms_norm": rms_norm,
    "scaled_dot_product_attention": softmax.attention,
    "_safe_softmax": softmax.safe_softmax,
}
"""Operators made of others, replaced above autograd by exact pieces and the kernels above."""


class _Installed:
    """How many are inside, and what holds the registrations while anybody is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.kernels: dispatcher.Library | None = None
        self.fast = True
        """Whether attention may take a fused kernel of its own, without gradients, when nobody is inside."""


_state = _Installed()


@contextmanager
def installed(asked: grids.Grids = grids.FINE) -> Iterator[None]:
    """The surrogates in place, in the whole process, until the last one leaves. Re-entrant; threads may share it.

    On the grids that are ``asked`` for; all who are inside at once ask for the same.
    """
    with _state.lock:
        if _state.inside and grids.now() != asked:
            raise RuntimeError("surrogates are in place already, on other grids; two kinds at once cannot be")
        grids.place(asked)
        _state.inside += 1
        if _state.kernels is None:
            _state.kernels, _state.fast = _registered(), mha.get_fastpath_enabled()
            mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _state.lock:
            _state.inside -= 1
            if not _state.inside and _state.kernels is not None:
                remove_kernels(_state.kernels)
                grids.place(grids.FINE)
                _state.kernels = None
                mha.set_fastpath_enabled(_state.fast)


def active() -> bool:
    """Whether the surrogates are in place."""
    return _state.inside > 0


def _registered() -> dispatcher.Library:
    if "torch.distributed.tensor" in sys.modules:
        _shard_rms_xhat()
        spelled_out.shard()
    kernels: Any = dispatcher.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for device in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            for name, kernel in KERNELS.items():
                kernels.impl(name, kernel, device)
            for name, function in COMPOSITES.items():
                kernels.impl(name, function, f"Autograd{device}")
                kernels.impl(name, function, device)
    registered: dispatcher.Library = kernels
    return registered
