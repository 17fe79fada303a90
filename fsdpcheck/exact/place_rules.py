"""What reading and writing by place does to exactness: rows of embeddings, scatter and index; see ``operators``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.exact.operators import Bound, Inexact, Operand, constant, rule, scaled

_aten = torch.ops.aten


def _apart(index: Tensor, dim: int) -> None:
    """Raise Inexact where two values are written to one place: which of them stays is nobody's promise."""
    met = torch.zeros(index.shape, dtype=torch.int64, device=index.device)
    if index.numel():
        size = [*index.shape]
        size[dim] = int(index.max()) + 1
        met = torch.zeros(size, dtype=torch.int64, device=index.device)
        met.scatter_add_(dim, index, torch.ones_like(index))
    if bool((met > 1).any()):
        raise Inexact("writes to places that coincide, in no order")


@rule(_aten.scatter.src, _aten.scatter_.src)
def _scatter(a: Operand, dim: int, index: Tensor, source: Operand) -> Sequence[Bound]:
    _apart(index, dim)
    terms = _aten.scatter.src(a.magnitude, dim, index, source.magnitude)
    return [Bound(terms, min(a.exponent, source.exponent))]


@rule(_aten.scatter.value, _aten.scatter_.value)
def _scatter_value(a: Operand, dim: int, index: Tensor, value: float) -> Sequence[Bound]:
    terms = _aten.scatter.value(a.magnitude, dim, index, abs(value))
    return [Bound(terms, min(a.exponent, constant(value).exponent))]


@rule(_aten.index_copy.default, _aten.index_copy_.default)
def _index_copy(a: Operand, dim: int, index: Tensor, source: Operand) -> Sequence[Bound]:
    _apart(index, 0)
    terms = _aten.index_copy.default(a.magnitude, dim, index, source.magnitude)
    return [Bound(terms, min(a.exponent, source.exponent))]


@rule(_aten.embedding_dense_backward.default)
def _embedding_backward(grad: Operand, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> Sequence[Bound]:
    if by_frequency:
        raise Inexact("divides rows by how often they occur (scale_grad_by_freq), which may be no power of two")
    terms = _aten.embedding_dense_backward.default(grad.magnitude, indices, rows, padding, False)
    return [Bound(terms, grad.exponent)]


@rule(_aten.index_add.default, _aten.index_add_.default)
def _index_add(a: Operand, dim: int, index: Tensor, source: Operand, alpha: float = 1) -> Sequence[Bound]:
    added = scaled(source, alpha)
    terms = _aten.index_add.default(a.magnitude, dim, index, added.magnitude)
    return [Bound(terms, min(a.exponent, added.exponent))]


@rule(_aten.scatter_add.default, _aten.scatter_add_.default)
def _scatter_add(a: Operand, dim: int, index: Tensor, source: Operand) -> Sequence[Bound]:
    terms = _aten.scatter_add.default(a.magnitude, dim, index, source.magnitude)
    return [Bound(terms, min(a.exponent, source.exponent))]


@rule(_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
def _index_put(
    a: Operand, indices: Sequence[Tensor | None], values: Operand, accumulate: bool = False, unsafe: bool = False
) -> Sequence[Bound]:
    if not accumulate:
        raise Inexact("writes to places that may coincide, in no order")
    terms = _aten.index_put.default(a.magnitude, indices, values.magnitude, True)
    return [Bound(terms, min(a.exponent, values.exponent))]


@rule(_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight: Operand, indices: Tensor, offsets: Tensor, by_frequency: bool = False, mode: int = 0, *rest: Any
) -> Sequence[Bound | None]:
    _adds_or_averages(by_frequency, mode, rest[1] if len(rest) > 1 else None)
    terms, _, sizes, _ = _aten._embedding_bag.default(weight.magnitude, indices, offsets, False, mode, *rest)
    return [Bound(terms, weight.exponent - _halvings(mode, sizes)), None, None, None]


_SUM, _MEAN = 0, 1


def _adds_or_averages(by_frequency: bool, mode: int, weights: Any) -> None:
    if mode not in (_SUM, _MEAN) or by_frequency or weights is not None:
        raise Inexact("is an EmbeddingBag that does not just add up or average rows")


def _halvings(mode: int, sizes: Tensor) -> int:
    """k where bags of ``sizes`` rows are divided by 2**k at most."""
    if mode == _SUM or not sizes.numel():
        return 0
    mantissas, exponents = sizes.double().clamp(min=1).frexp()
    if bool((mantissas != 0.5).any()):
        raise Inexact("averages rows of a bag whose number is no power of two")
    return int(exponents.max()) - 1


@rule(_aten._embedding_bag_dense_backward.default)
def _embedding_bag_backward(grad: Operand, *rest: Any) -> Sequence[Bound]:
    _adds_or_averages(rest[5], rest[6], rest[7])
    terms = _aten._embedding_bag_dense_backward.default(grad.magnitude, *rest)
    return [Bound(terms, grad.exponent - _halvings(rest[6], rest[2]))]


@rule(_aten._embedding_bag_backward.default)
def _composite_embedding_bag_backward(grad: Operand, *rest: Any) -> Sequence[Bound]:
    _adds_or_averages(rest[6], rest[7], rest[9])
    terms = _aten._embedding_bag_backward.default(grad.magnitude, *rest)
    return [Bound(terms, grad.exponent - _halvings(rest[7], rest[3]))]
