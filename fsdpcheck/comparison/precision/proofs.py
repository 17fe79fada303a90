"""Proofs that an operator gives what real arithmetic gives, from the values that it is given; else nothing is proved.

All values of a tensor are multiples of one power of two, its unit. A sum of products, added in any order and in any
blocks, is exact where the sum of their absolute values is less than 2**53 units of such a product: every sum on the way
is a multiple of the unit and has at most 53 bits. The sum of absolute values is computed by the operator itself, of
absolute values, and one bit is left for its rounding.

That holds for kernels that add the products themselves, as those of torch for float64 on a CPU do, and not for ones
that add transformed ones (Winograd, Fourier). What is in no table here is not exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision.multiples import (
    Multiple,
    Unproved,
    fit,
    is_held,
    is_power,
    is_short,
    multiple,
    odd,
    product,
)
from fsdpcheck.comparison.precision.operators import Operator
from fsdpcheck.compat.dispatch_private import WITHOUT_VALUES


def is_exact(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call, which has not been made yet, is proved exact."""
    try:
        return _is_proved(operator, args, kwargs)
    except (Unproved, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False  # an operator may refuse absolute values


def makes_short(operator: Operator, result: Any) -> bool:
    """Whether an operator that makes constants has made ones of few bits, or none yet."""
    return operator.base in WITHOUT_VALUES or all(is_short(made) for made in _tensors(result))


def adds_exactly(terms: Sequence[Sequence[Tensor]], average: bool) -> bool:
    """Whether ranks, each of which gives some tensors, may add them up, or average them."""
    try:
        found = [multiple(tensor) for given in terms for tensor in given]
    except Unproved:
        return False
    many = len(terms)
    largest = max((each.top for each in found), default=0.0)
    unit = min((each.unit for each in found), default=0)
    return (is_power(many) or not average) and fit([Multiple(largest * many, unit)])


def _is_proved(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    base, given = operator.base, list(_numbers_and_tensors((args, kwargs)))
    if operator.rounding == "communication" or operator.rounding == "constant":
        return True  # looked at where ranks meet, and when they are made
    tensors = [value for value in given if isinstance(value, Tensor)]
    if not tensors and not any("Tensor" in str(made.type) for made in operator.func._schema.returns):
        return True
    if tensors and all(value.is_meta for value in tensors):
        return True
    if any(value.is_complex() for value in tensors):
        return False
    if not any(_is_float(value) for value in given) and base not in _RULES and base not in _SUMS:
        return operator.rounding == "exact" or base in _OF_INTEGERS or _casts_exactly(operator, args, kwargs)
    if operator.rounding in ("exact", "cast") or base in _COMPARING:
        adds = operator.accumulates is not None and len(args) > operator.accumulates and args[operator.accumulates]
        if not adds:
            moved = all(is_held(value) for value in given)
            return moved and (operator.rounding != "cast" or _casts_exactly(operator, args, kwargs))
    if args and isinstance(args[0], list | tuple) and base in _RULES:
        return all(
            _RULES[base]([value[place] if isinstance(value, list | tuple) else value for value in args], kwargs)
            for place in range(len(args[0]))
        )
    if base in _RULES:
        return _RULES[base](args, kwargs)
    return base in _SUMS and _sums(operator, args, kwargs)


def _casts_exactly(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Floats to float64, or to integers; integers of 53 bits to float64, others to integers."""
    if operator.rounding != "cast":
        return False
    sources = _tensors(args[1] if operator.base == "copy" else args[0])
    kinds = [target.dtype for target in _tensors(args[0])] if operator.base == "copy" else [kwargs.get("dtype")]
    rounds = any(kind is not None and kind.is_floating_point for kind in kinds)
    return not rounds or all(source.is_floating_point() or multiple(source).top < 2.0**53 for source in sources)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _numbers_and_tensors(values: Any) -> list[Any]:
    if isinstance(values, Tensor | int | float):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [one for inner in values for one in _numbers_and_tensors(inner)] if isinstance(values, list | tuple) else []


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in _numbers_and_tensors(values) if isinstance(value, Tensor)]


def _option(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _add(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return fit([multiple(args[0]), product(multiple(args[1]), multiple(_option(args, kwargs, 2, "alpha", 1)))])


def _rsub(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return _add([args[1], args[0], *args[2:]], kwargs)


def _mul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return fit([product(multiple(args[0]), multiple(args[1]))])


def _addcmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    scale = multiple(_option(args, kwargs, 3, "value", 1))
    return fit([multiple(args[0]), product(multiple(args[1]), multiple(args[2]), scale)])


def _div(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """By powers of two, which moves the unit and the largest number alike."""
    by = args[1] if isinstance(args[1], Tensor) else torch.tensor(float(args[1]), dtype=torch.float64)
    divided, divisor = multiple(args[0]), multiple(by)
    if _option(args, kwargs, 2, "rounding_mode", None) is not None or not divisor.top or not bool((by != 0).all()):
        return False
    is_odd = bool((odd(by.double()) != 1).any())
    spread = round(math.log2(divisor.top)) - divisor.unit
    return not is_odd and fit([Multiple(math.ldexp(divided.top, -divisor.unit), divided.unit - divisor.unit - spread)])


def _square(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return _mul([args[0], args[0]], {})


def _power(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not isinstance(args[1], Tensor) and args[1] == 2 and _square(args, kwargs)


def _leaky(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    slope = _option(args, kwargs, 1, "negative_slope", 0.01)
    return fit([product(multiple(args[0]), multiple(slope))])


def _leaky_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of ``leaky_relu_backward(gradient, input, slope, ...)``."""
    return fit([product(multiple(args[0]), multiple(args[2]))])


def _difference(one: Any, other: Any) -> Multiple:
    terms = [multiple(one), multiple(other)]
    if not fit(terms):
        raise Unproved
    return Multiple(sum(term.top for term in terms), min(term.unit for term in terms))


def _squared_error(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``mse_loss(input, target, reduction)``; 0 none, 1 mean, 2 sum."""
    reduction, many = _option(args, kwargs, 2, "reduction", 1), args[0].numel()
    square = product(*[_difference(args[0], args[1])] * 2)
    return (reduction != 1 or is_power(many)) and fit([square._replace(top=square.top * (many if reduction else 1))])


def _squared_error_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of ``mse_loss_backward(gradient, input, target, reduction)``: 2 (input - target) gradient, or that over many."""
    many = args[1].numel() if _option(args, kwargs, 3, "reduction", 1) == 1 else 1
    factor = Multiple(2.0 / many, 2 - many.bit_length()) if is_power(many) else None
    return factor is not None and fit([product(factor, _difference(args[1], args[2]), multiple(args[0]))])


_COMPARISONS: Final = """
eq ne lt le gt ge isnan isinf isfinite isposinf isneginf signbit logical_and logical_or logical_xor logical_not any all
argmax argmin nonzero count_nonzero equal is_nonzero searchsorted bucketize
"""
_INTEGERS: Final = """
bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __lshift__ __rshift__ remainder floor_divide
bincount
"""
_Rule = Callable[[Sequence[Any], Mapping[str, Any]], bool]
_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(("add", "sub", "subtract"), _add),
    **dict.fromkeys(("mul", "multiply"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
    **{
        "rsub": _rsub,
        "addcmul": _addcmul,
        "square": _square,
        "pow": _power,
        "leaky_relu": _leaky,
        "leaky_relu_backward": _leaky_backward,
        "mse_loss": _squared_error,
        "mse_loss_backward": _squared_error_backward,
    },
}
_SUMS: Final[dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), (((0, 1),), ())),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr"), (((1, 2),), (0,))),
    **dict.fromkeys(("convolution", "linear"), (((0, 1),), (2,))),
    "convolution_backward": (((0, 2), (0, 1), (0,)), ()),
    **dict.fromkeys(("sum", "mean", "cumsum", "trace", "max_pool2d_with_indices_backward"), (((0,),), ())),
    **dict.fromkeys(("index_add", "scatter_add"), (((3,),), (0,))),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), (((2,),), (0,))),
    "embedding_dense_backward": (((0,),), ()),
}
"""Which arguments are multiplied, in each of several sums, and which are added to them."""
_COMPARING: Final = frozenset(_COMPARISONS.split())
_OF_INTEGERS: Final = _COMPARING | frozenset(_INTEGERS.split())


def _sums(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    products, added = _SUMS[operator.base]
    if operator.base == "embedding_dense_backward" and args[4]:  # by how often each comes
        return False
    lower = sum(min(0, multiple(kwargs[name]).unit) for name in ("alpha", "beta") if name in kwargs)
    places = {place for product in (*products, added) for place in product if place < len(args)}
    known = {place: multiple(args[place]) for place in places if args[place] is not None}
    unit = min(
        (
            product(*(known[place] for place in term if place in known)).unit + lower
            for term in (*products, *((place,) for place in added))
            if all(place in known for place in term)
        ),
        default=0,
    )
    given = [
        args[place].detach().double().abs() if place in known else _apart(args[place]) for place in range(len(args))
    ]
    options = {name: abs(value) if name in ("alpha", "beta") else _apart(value) for name, value in kwargs.items()}
    found = _tensors(operator.func(*given, **options))
    if operator.base == "mean":
        many = args[0].numel() // max(found[0].numel(), 1)
        if not is_power(many):
            return False
        return all(fit([Multiple(_top(made) * many, unit), Multiple(0.0, 0)]) for made in found)
    return all(fit([Multiple(_top(made), unit)]) for made in found if made.is_floating_point())


def _apart(value: Any) -> Any:
    """A copy, where the operator might write."""
    return value.clone() if isinstance(value, Tensor) else value


def _top(made: Tensor) -> float:
    return float(made.abs().max()) if made.numel() else 0.0
