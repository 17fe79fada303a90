"""The certifier: watches a computation operator by operator and proves that its sums are exact in every order.

It knows torch's operators, not modules, so it takes any model, forward and backward. It fails closed: an operator
without a rule, a value off every grid, or a sum that takes too many bits raises NotExact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.compat.torch_private import without_modes
from fsdpcheck.errors import NotExact
from fsdpcheck.exact import off_grid, place_rules, surrogate_rules, window_rules
from fsdpcheck.exact.grid import bits, grid_exponent
from fsdpcheck.exact.off_grid import OffGrid
from fsdpcheck.exact.operators import COMPLEX, LOGICAL, MOVES, RULES, Bound, Inexact, Operand
from fsdpcheck.exact.surrogates import spelled_out
from fsdpcheck.exact.wider_dtype import Casts, Wider

_ = surrogate_rules, window_rules, place_rules  # register their rules


@dataclass(frozen=True)
class Precision:
    """Bits of the significand that an arithmetic gives to sums (``accumulator``), factors and results of operators."""

    accumulator: int
    operand: int
    result: int


FLOAT64 = Precision(53, 53, 53)
FLOAT32 = Precision(24, 24, 24)
TF32 = Precision(24, 11, 24)
"""float32 whose matrix products round their factors to 11 bits (Ampere and later, where it is allowed)."""
BFLOAT16 = Precision(24, 8, 8)
"""bfloat16 in and out, sums in float32."""
PRECISIONS = {"float64": FLOAT64, "float32": FLOAT32, "tf32": TF32, "bfloat16": BFLOAT16}

LOWEST = -(2.0**127)
"""No score comes near it, and torch.finfo(dtype).min is below, in float64 as in a bfloat16: models mask with that."""
_CONVOLUTIONS = ("convolution", "convolution_backward")
"""Of which not every kernel sums in the accumulator: columns of windows, and batches, may be added up in results."""
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", *_CONVOLUTIONS)
_ADDITIONS = ("add", "add_", "sub", "sub_", "rsub")
_MASKED = ("threshold_backward", "hardtanh_backward", "hardshrink_backward", "masked_fill", "masked_fill_")

_CHOOSING = (
    *("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "hardtanh", "hardtanh_"),
    *("maximum", "minimum"),
)
"""Moves of whichever operand, or bound, is the greater or the less."""
_OF_MEMORY = ("as_strided", "_reshape_alias")
"""Moves that read what lies in memory, whatever element it is."""


@dataclass
class Certifier(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the ``with`` block every operator is checked; ``used`` keeps the most bits by operator.

    The computation runs in float64, whose values are then those of ``precision`` too: that is what is proved.
    ``stage`` names what is computed, for messages. With ``paths``, bounds of backward add up the absolute values of all
    paths from the losses, instead of starting anew from the value at each operator. With ``roundable``, values of the
    forward may leave every grid if nothing is made of them but surrogates that round them to one (exact/off_grid.py).
    And -inf, which attention masks with and which stands for nothing, may be ``LOWEST`` there. ``in_wider``: the
    precision of what a model computes in a wider dtype that it names (exact/wider_dtype.py).
    """

    precision: Precision
    where: str = ""
    stage: str = "forward"
    used: dict[str, int] = field(default_factory=dict)
    paths: bool = False
    lenient: bool = False
    roundable: bool = False
    in_wider: Precision | None = None

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bounds: dict[int, Bound] = {}
        self._alive: list[Tensor] = []
        self._masks = LOWEST if self.roundable else -math.inf
        self._wider = Wider() if self.in_wider is not None else None
        narrow, wide = map(_least, (self.precision, self.in_wider or self.precision))
        self._off = OffGrid(narrow, self._wider, wide, self._masks)

    def __hash__(self) -> int:
        return id(self)

    def bound(self, tensor: Tensor) -> Bound:
        """The bound on the terms of a tensor computed inside; its own magnitude if it was only moved."""
        found = self._bounds.get(id(tensor))
        if found is not None and found.terms.numel() == tensor.numel():
            return found
        return Bound(tensor.detach().abs(), grid_exponent(tensor))

    @contextmanager
    def values_unused(self) -> Iterator[None]:
        """Inside, sums and products need not be exact: nobody uses the values, only what backward saves of them."""
        self.lenient = True
        try:
            yield
        finally:
            self.lenient = False

    def casts_back(self) -> AbstractContextManager[object]:
        """Around a forward, in which a model may cast back what it computes in the wider dtype."""
        return nullcontext() if self._wider is None else Casts(self._wider, self._cast_back)

    def _cast_back(self, tensor: Tensor) -> None:
        """On ranks it is a copy in few bits. Raises NotExact for what such a copy is not, or has no bits for."""
        if spelled_out.is_marked(tensor):
            raise NotExact(
                f"{self.where}, {self.stage}: a root or a total is cast back before it is used, and is none on ranks; "
                "next: multiply or divide by it first, and cast then"
            )
        self._off.round(tensor)
        if self._off.found([tensor]) is None:
            with without_modes():
                self._spend("cast back", self._operand(tensor), self.precision.result)

    def is_in_wider(self, tensors: Iterable[Tensor]) -> None:
        """These are of the wider dtype, as buffers are."""
        if self._wider is not None:
            for tensor in tensors:
                self._wider.add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._wider is None:
            return self._computed(func, args, kwargs or {})
        narrow, in_wider = self.precision, self._wider.computes(args)
        self.precision = self.in_wider if in_wider and self.in_wider is not None else narrow
        try:
            result = self._computed(func, args, kwargs or {})
        finally:
            self.precision = narrow
        if in_wider:
            self._wider.remember(result)
        if func.overloadpacket.__name__ != "_to_copy" or not _floating(result) or self._off.found([result]):
            return result
        if in_wider:
            self._off.cast(args[0], result)
        else:
            self._spend("result of _to_copy", self._operand(result), narrow.result)  # of integers, maybe
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule, name = RULES.get(func), func.overloadpacket.__name__
        if rule is not None and not any(_floating(value) for value in _flat(args)):
            rule = None  # integers: positions, masks
        if any(_narrow(value) for value in _flat(args)):
            self._refuse(func, "computes in fewer bits than float64; next: the tier of real numbers")
        if name not in COMPLEX and any(map(_complex, [*_flat(args), *_flat(kwargs.values())])):
            self._refuse(func, "computes in complex numbers; next: the tier of real numbers")
        if self.roundable and name not in off_grid.AWARE and (off := self._off.found([*args, *kwargs.values()])):
            return self._leaves_the_grid(func, name, args, kwargs, off[1])
        if rule is not None:
            try:
                bounds = self._judged(func, name, rule, args, kwargs)
                result = func(*args, **kwargs)
                self._keep(name, result, bounds)
            except NotExact as error:
                if not (self.roundable and self.stage == "forward" and not self.lenient and name in off_grid.RULES):
                    raise
                return self._leaves_the_grid(func, name, args, kwargs, str(error))
            return result
        result = func(*args, **kwargs)
        if func in MOVES:
            self._carry(func, name, args, kwargs, result)
            if name == "sort":  # what top-k is made of
                self.used.setdefault(f"{self.stage} {name}", 0)
        elif _made_of_integers(func, args, kwargs, result):
            pass
        elif _floating(result) or (name not in LOGICAL and func not in RULES):
            self._refuse(func, "has no rule; next: the tier of real numbers, or add a rule to exact/operators.py")
        return result

    def on_grid(self, tensor: Tensor) -> None:
        """Raises NotExact where values of ``tensor`` are off every grid, saying what took them there."""
        if off := self._off.found([tensor]):
            raise NotExact(off[1])

    def _leaves_the_grid(self, func: Any, name: str, args: Any, kwargs: Any, why: str) -> Any:
        """What ``func`` gives where its operands, or its result, are off every grid; ``why`` is what is said of it."""
        if self.stage != "forward" or self.lenient:
            raise NotExact(f"{why}; {self.stage} {name} takes what it gives")
        result = func(*args, **kwargs)
        try:
            self._off.remember(result, self._off.after(name, args, kwargs, result), why)
        except Inexact as error:
            raise NotExact(f"{why}; {name} {error}") from None
        return result

    def _judged(self, func: Any, name: str, rule: Callable[..., Any], args: Any, kwargs: Any) -> list[Bound | None]:
        try:
            operand = self._traced if self.paths or name in _ADDITIONS else self._operand
            operand = self._off_operand if name in off_grid.AWARE else operand
            operands = _mapped(operand, args)
            if name in _PRODUCTS:
                self._require_no_masks(args)
                self._factors(name, operands)
            elif name == "mul":
                operands = [0.0 if self._is_mask(value) else value for value in operands]
            return list(rule(*operands, **kwargs))
        except Inexact as reason:
            self._refuse(func, str(reason))
            raise

    def _operand(self, value: Any) -> Any:
        """A floating-point tensor as Operand."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        finite = value.detach()
        masks = finite <= self._masks
        if value.dim() and bool(masks.any()):
            finite = finite.masked_fill(masks, 0.0)
        return Operand(finite.abs(), grid_exponent(finite), value, self.precision.accumulator)

    def _is_mask(self, value: Any) -> bool:
        """A scalar that a mask of zeros and ones is multiplied by: elementwise, so that no order changes the result."""
        return self.roundable and isinstance(value, float) and value <= LOWEST

    def _require_no_masks(self, factors: Any) -> None:
        """Sums of products with a number as large as a mask depend on the order."""
        tensors = [value for value in _flat(factors) if isinstance(value, Tensor) and value.is_floating_point()]
        if self.roundable and any(bool((value <= LOWEST).any()) for value in tensors):
            raise Inexact("multiplies what masks")

    def _off_operand(self, value: Any) -> Any:
        """The same, with how far its value may be off."""
        found = self._operand(value)
        return replace(found, error=self._off.error(value)) if isinstance(found, Operand) else found

    def _traced(self, value: Any) -> Any:
        """The same, by the bound on its terms where there is one."""
        known = self._bounds.get(id(value)) if isinstance(value, Tensor) else None
        return self._operand(value) if known is None else Operand(known.terms, known.exponent, value.detach())

    def _factors(self, name: str, operands: Any) -> None:
        for operand in operands:
            if isinstance(operand, Operand):
                self._spend(f"factors of {name}", operand, self.precision.operand)

    def _keep(self, name: str, result: Any, bounds: list[Bound | None]) -> None:
        results = result if isinstance(result, (tuple, list)) else [result]
        for tensor, bound in zip(results, bounds, strict=True):
            if bound is None or not isinstance(tensor, Tensor):
                continue
            if not self.lenient or name in _ADDITIONS:
                sums = self.precision.result if name in _CONVOLUTIONS else self.precision.accumulator
                self._spend(name, Operand(bound.terms, bound.exponent), sums)
                if self.precision.result < self.precision.accumulator:
                    self._spend(f"result of {name}", self._operand(tensor), self.precision.result)
            if self.stage != "forward":
                self._remember(tensor, bound)

    def _spend(self, name: str, operand: Operand, had: int) -> None:
        largest = float(operand.magnitude.max()) if operand.magnitude.numel() else 0.0
        needed = bits(largest, operand.exponent)
        key = f"{self.stage} {name}"
        if needed > had:
            raise NotExact(f"{self.where}, {key}: needs {needed} bits; had {had}")
        self.used[key] = max(self.used.get(key, 0), needed)

    def _carry(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """A move of something with a known bound moves the bound too. What masks a gradient stays as it is."""
        moved = args[:1] if name in _MASKED else args
        known = self._bounds and any(id(value) in self._bounds for value in _flat(moved))
        if not known or not isinstance(result, Tensor):
            return
        traced = _mapped(self._traced, moved)
        exponents = [value.exponent for value in _flat(traced) if isinstance(value, Operand)]
        if name in _OF_MEMORY and not all(
            map(_is_whole, (value for value in _flat(moved) if isinstance(value, Tensor)))
        ):
            self._refuse(func, "reads memory that it shares with others")
        plain = _mapped(lambda value: _laid_out(value) if isinstance(value, Operand) else value, traced)
        if name in _CHOOSING:  # of absolute values it would choose others
            with without_modes():
                chosen = result.detach()
                some = [value for value in _flat(plain) if isinstance(value, Tensor)]
                terms = functools.reduce(torch.maximum, some, chosen.abs())
                self._remember(result, Bound(terms, min(*exponents, grid_exponent(chosen))))
            return
        terms = func(*plain, *args[len(moved) :], **kwargs)
        self._remember(result, Bound(terms if _complex(terms) else terms.abs(), min(exponents)))

    def _remember(self, tensor: Tensor, bound: Bound) -> None:
        """By identity, so the tensor is kept alive."""
        self._alive.append(tensor)
        self._bounds[id(tensor)] = bound

    def _refuse(self, func: Any, why: str) -> None:
        raise NotExact(f"{self.where}, {self.stage}: the exact domain cannot express {func}: it {why}")


def _laid_out(operand: Operand) -> Tensor:
    """Its magnitudes in the strides of its value: a view is made for these."""
    terms, value = operand.magnitude, operand.value
    if value is None or terms.shape != value.shape or terms.stride() == value.stride() or not _lies_apart(value):
        return terms
    return torch.empty_strided(value.shape, value.stride(), dtype=terms.dtype).copy_(terms)


def _lies_apart(value: Tensor) -> bool:
    """Whether no two elements lie at one place, as those of what is expanded or unfolded do."""
    reached = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < reached:
            return False
        reached += stride * (size - 1)
    return True


def _is_whole(value: Tensor) -> bool:
    """Whether its elements are all of its memory, from the first on."""
    begins = value.storage_offset() == 0
    return begins and _lies_apart(value) and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _least(precision: Precision) -> int:
    return min(precision.accumulator, precision.operand, precision.result)


def _mapped(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """``function`` of each value, and of each in a list of tensors."""

    def deep(value: Any) -> Any:
        return [function(part) for part in value] if isinstance(value, (list, tuple)) else function(value)

    return [deep(value) for value in values]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _narrow(value: Any) -> bool:
    """Whether a tensor's dtype rounds where float64 does not: bounds in float64 would promise too much of it."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _made_of_integers(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether nothing rounds: integers in, and out integers or whole numbers of an arange. None that are random."""
    name = func.overloadpacket.__name__
    undefined = name.startswith("empty") or torch.Tag.nondeterministic_seeded in func.tags
    if undefined or _floating([*_flat(args), *kwargs.values()]):
        return False
    counted = name == "arange" and bool((result == result.round()).all())
    return counted or not _floating(result)


def _floating(result: Any) -> bool:
    results = result if isinstance(result, (tuple, list)) else [result]
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in results)
