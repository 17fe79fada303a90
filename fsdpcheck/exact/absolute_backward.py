"""Absolute paths through the backward pass of true functions: what rounding errors in it are relative to.

A backward pass is linear in the gradient of the losses. A path from a loss to an element of a parameter's gradient is a
product of coefficients, one an operator, which kernels form of what the forward kept. Two evaluations whose forward has
the same bits err by gamma(k) times the paths' absolute values added up, at most k roundings on a path (Higham, Accuracy
and Stability of Numerical Algorithms, lemma 3.1), in whatever order they add, weigh and contract. Kernels form their
coefficients of the same bits alike. A normalised value, which norm rules form anew and in which terms may cancel, is
taken by the absolute values of its terms.

It fails closed: an operator without a rule, or one that is not linear in the gradient, raises NotExact. float64 only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.errors import NotExact

_aten = torch.ops.aten
_SAME = {
    "t", "unfold", "transpose", "permute", "expand", "squeeze", "squeeze_",
    "unsqueeze", "slice", "select", "split", "split_with_sizes", "unbind", "cat", "stack", "clone", "detach", "alias",
    "index", "index_select", "gather", "flip", "_to_copy", "constant_pad_nd", "slice_backward", "select_backward",
    "diagonal", "diagonal_backward", "where", "sum", "mean", "mm", "bmm", "mv", "dot", "mul", "mul_", "neg", "neg_",
    "convolution_backward", "copy_", "scatter_add", "index_add", "index_put", "index_put_", "unfold_backward",
    "as_strided",
}  # fmt: skip
"""Operators that add up products of their operands: of absolute values they give a bound."""
_FIRST = {
    "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "elu_backward", "softplus_backward",
    "hardswish_backward", "hardsigmoid_backward", "mish_backward", "log_sigmoid_backward", "leaky_relu_backward",
    "threshold_backward", "hardtanh_backward", "masked_fill", "masked_fill_", "embedding_dense_backward",
    "nll_loss_backward", "nll_loss2d_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
}  # fmt: skip
"""Operators that multiply their first operand by coefficients of one sign each and add up: the others stay as they
are."""
_PRODUCTS = {"mm", "bmm", "mv", "dot", "mul", "mul_", "convolution_backward"}
_FRESH = {
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "full_like",
}

Known = Callable[[Tensor], Tensor]
"""A tensor -> the bound on its terms: its paths, or its absolute value."""


class TruePaths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows ``start``, the gradient of the losses, through all that is computed of it within the ``with`` block."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._terms: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []
        self._remember(start, start.detach().abs())

    def terms(self, tensor: Tensor) -> Tensor:
        """Absolute values of all paths to each element, added up; zeros where none leads. Raises NotExact."""
        found = self._terms.get(id(tensor))
        if found is None and bool(tensor.any()):
            raise NotExact("a gradient came out that was not seen to be computed of the losses' own")
        return torch.zeros_like(tensor) if found is None else found.reshape(tensor.shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        followed = [value for value in _tensors((*args, *kwargs.values())) if id(value) in self._terms]
        name = func.overloadpacket.__name__
        alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
        bounds: list[Tensor] = []
        if followed and name not in _FRESH:
            views = alias is not None and not alias.is_write and id(args[0]) in self._terms and name in _SAME
            bounds = self._views(func, args, kwargs) if views else self._bounds(func, name, args, kwargs, len(followed))
        result = func(*args, **kwargs)
        for tensor, bound in zip(_tensors([result]), bounds, strict=bool(bounds)):
            if tensor.dtype != torch.float64:
                raise NotExact(f"{func} computes in {tensor.dtype}, whose roundings are not bounded here")
            if alias is not None and alias.is_write and id(tensor) in self._terms:  # and so in all that it is a view of
                self._terms[id(tensor)].copy_(bound)
            else:
                self._remember(tensor, bound)
        return result

    def _views(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The bound of a view is a view of the bound: what is written through one is written in the other."""
        base, terms = args[0], self._terms[id(args[0])]
        whole = base.is_contiguous() and terms.is_contiguous() and not base.storage_offset()
        if func.overloadpacket.__name__ == "as_strided" and not whole:
            raise NotExact(f"{func} of a part of its storage has no rule")
        return _tensors([func(terms, *args[1:], **kwargs)])

    def _bounds(self, func: Any, name: str, args: Any, kwargs: Any, followed: int) -> list[Tensor]:
        if name in _PRODUCTS and followed > 1:
            raise NotExact(f"{func} multiplies gradients by each other")
        if name in ("div", "div_") and id(args[1]) in self._terms:
            raise NotExact(f"{func} divides by a gradient")
        if name in _RULES:
            return list(_RULES[name](self._known, *args, **kwargs))
        if name in _FIRST and followed == 1 and id(args[0]) in self._terms:
            return [found.abs() for found in _tensors([func(self._known(args[0]), *args[1:], **kwargs)])]
        if name in _SAME:
            found = func(*_mapped(self._known, args), **kwargs)
            return [terms.abs() for terms in _tensors([found])]
        raise NotExact(f"{func} has no rule of what roundings in its backward pass are relative to")

    def _known(self, value: Tensor) -> Tensor:
        found = self._terms.get(id(value))
        return value.detach().abs() if found is None else found.clone()

    def _remember(self, tensor: Tensor, terms: Tensor) -> None:
        """By identity, so the tensor is kept alive."""
        self._alive.append(tensor)
        self._terms[id(tensor)] = terms


def _tensors(values: Any) -> list[Tensor]:
    """The tensors of numbers among values and lists of them."""
    flat = [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [value for value in flat if isinstance(value, Tensor) and value.is_floating_point()]


def _mapped(known: Known, values: Any) -> list[Any]:
    def one(value: Any) -> Any:
        return known(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    return [[one(part) for part in value] if isinstance(value, (list, tuple)) else one(value) for value in values]


# -- rules ------------------------------------------------------------------------------------------------------------


def _reshaped(known: Known, value: Tensor, shape: Any, *strides: Any) -> Sequence[Tensor]:
    return [known(value).reshape(shape)]


def _added(known: Known, a: Any, b: Any, alpha: float = 1) -> Sequence[Tensor]:
    one, two = (known(value) if isinstance(value, Tensor) else abs(value) for value in (a, b))
    return [one + two * abs(alpha)]


def _divided(known: Known, a: Any, b: Any) -> Sequence[Tensor]:
    return [known(a) / (b.detach().abs() if isinstance(b, Tensor) else abs(float(b)))]


def _softmax_backward(known: Known, grad: Tensor, p: Tensor, dim: int, dtype: Any) -> Sequence[Tensor]:
    own = known(grad)
    return [p * (own + (own * p).sum(dim, keepdim=True))]


def _log_softmax_backward(known: Known, grad: Tensor, y: Tensor, dim: int, dtype: Any) -> Sequence[Tensor]:
    own = known(grad)
    return [own + y.exp() * own.sum(dim, keepdim=True)]


def _layer_norm_backward(
    known: Known, grad: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Tensor, weight: Any, bias: Any, mask: Any
) -> Sequence[Tensor]:
    count = torch.Size(shape).numel()
    own_RD, x_RD = known(grad).reshape(-1, count), x.detach().reshape(-1, count)
    scaled_RD = own_RD if weight is None else own_RD * weight.detach().abs().reshape(-1)
    normal_RD, of_input = _normalised(scaled_RD, x_RD, rstd.reshape(-1, 1))
    found = of_input.reshape(x.shape), (own_RD * normal_RD).sum(0).reshape(shape), own_RD.sum(0).reshape(shape)
    return [terms for terms, asked in zip(found, mask, strict=True) if asked]


def _group_norm_backward(
    known: Known, grad: Tensor, x: Tensor, mean: Any, rstd: Tensor, weight: Any, n: int, channels: int, area: int,
    groups: int, mask: Any,
) -> Sequence[Tensor]:  # fmt: skip
    own = known(grad).reshape(n, channels, area)
    scaled = own if weight is None else own * weight.detach().abs().reshape(1, -1, 1)
    rows = n * groups
    normal, of_input = _normalised(scaled.reshape(rows, -1), x.detach().reshape(rows, -1), rstd.reshape(-1, 1))
    of_weight = (own * normal.reshape(own.shape)).sum((0, 2))
    found = of_input.reshape(x.shape), of_weight, own.sum((0, 2))
    return [terms for terms, asked in zip(found, mask, strict=True) if asked]


def _normalised(scaled_RD: Tensor, x_RD: Tensor, rstd_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(bound on (x - mean) / std by its terms, paths to x), [R, D] each.

    1 / std rounds by as much more than a sum does as the mean is larger than std (Chan, Golub and LeVeque 1983).
    """
    spread_R1 = x_RD.abs().mean(1, keepdim=True)
    inverse_R1 = rstd_R1 * (1 + spread_R1 * rstd_R1)
    normal_RD = (x_RD.abs() + spread_R1) * inverse_R1
    means = scaled_RD.mean(1, keepdim=True) + normal_RD * (scaled_RD * normal_RD).mean(1, keepdim=True)
    return normal_RD, inverse_R1 * (scaled_RD + means)


def _attention_backward(
    known: Known, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout: float, causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    if dropout or query.shape[:2] != key.shape[:2]:
        raise NotExact("attention drops at random, or shares its keys between heads")
    q, k, v = (part.detach() for part in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    scores = q @ k.mT * factor
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).tril().logical_not(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    own, weights = known(grad), scores.softmax(-1)
    products = own @ v.abs().mT
    of_scores = weights * (products + (weights * products).sum(-1, keepdim=True)) * factor
    return [of_scores @ k.abs(), of_scores.mT @ q.abs(), weights.mT @ own]


_RULES: dict[str, Callable[..., Sequence[Tensor]]] = {
    "view": _reshaped,
    "_unsafe_view": _reshaped,
    "_reshape_alias": _reshaped,
    "add": _added,
    "add_": _added,
    "sub": _added,
    "sub_": _added,
    "rsub": _added,
    "div": _divided,
    "div_": _divided,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
