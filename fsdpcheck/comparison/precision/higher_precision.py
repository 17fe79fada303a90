"""Raised: float64 in place of every lower floating type, for what a script computes, and the same initial point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision import exactness
from fsdpcheck.comparison.precision.notes import is_casting_module, note
from fsdpcheck.comparison.precision.operators import WIDE, Operator
from fsdpcheck.comparison.precision.own_types import OwnTypes
from fsdpcheck.comparison.precision.random_draws import drawn
from fsdpcheck.comparison.precision.tables import SCALER

Call = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
_FLOATS: Final = frozenset((*WIDE, *WIDE.values()))


class Raised:
    """How one rank's operators are made in float64: their types and their tensors are raised first.

    An operator that writes to a tensor of a lower type, or views one, raises that tensor itself where it can, and is
    noted where it cannot.

    Not seen: ``x.float()`` of a raised tensor is a copy, where the script's own may be the tensor itself.
    ``x.double()`` of one is the tensor itself, whose draws in place are still made in the script's type of x.
    """

    def __init__(self) -> None:
        self._own = OwnTypes()

    def result(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
        """What the operator gives; ``call`` makes it."""
        rounding = operator.rounding
        if rounding == "draw":
            return drawn(operator, args, kwargs, self._own)
        if operator.base in SCALER:
            return self._scaler(operator, args, kwargs)
        if operator.name == "aten.view.dtype" and _is_of_bits(args[0].dtype, args[1]):
            note("bits were read as another type, of what may be float64 in place of it:")
            return call(operator, args, kwargs)
        raised, options, floats = self._arguments(operator, args, kwargs)
        if floats or operator.is_view or rounding == "communication":
            result = call(operator, raised, options)
        else:
            with wide_by_default():
                result = call(operator, raised, options)
        if operator.keeps:
            return result
        if not floats or type(result) is Tensor:
            result = _wide(result)
        if rounding == "constant" or rounding == "cast":
            kind = self._own.requested(operator, args, kwargs)
            if kind is not torch.float32:
                self._of_type(kind, result)
        return result

    def _arguments(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """The arguments raised, and whether a tensor of floats is among them."""
        floats = False
        raised: list[Any] | None = None
        count = len(args)
        for number in operator.tensors:
            if number >= count:
                break
            value = args[number]
            if isinstance(value, Tensor):
                kind = value.dtype
                if kind is torch.float64:
                    floats = True
                elif kind in WIDE:
                    floats = True
                    raised = list(args) if raised is None else raised
                    raised[number] = self._low(operator, number, value)
            elif value and type(value) in (list, tuple):
                floats = floats or any(isinstance(inner, Tensor) and inner.dtype in _FLOATS for inner in value)
                if any(isinstance(inner, Tensor) and inner.dtype in WIDE for inner in value):
                    raised = list(args) if raised is None else raised
                    raised[number] = [self._low(operator, number, inner) for inner in value]
        for number in operator.types:
            if number < count and args[number] in WIDE:
                raised = list(args) if raised is None else raised
                raised[number] = WIDE[args[number]]
        if kwargs:
            kwargs = {name: self._option(operator, name, value) for name, value in kwargs.items()}
            floats = floats or any(isinstance(value, Tensor) for value in kwargs.values())
        return args if raised is None else tuple(raised), kwargs, floats

    def _option(self, operator: Operator, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._low(operator, name, value)
        if isinstance(value, torch.dtype):
            return WIDE.get(value, value)
        if isinstance(value, list | tuple) and any(isinstance(inner, Tensor) for inner in value):
            return [self._low(operator, name, inner) for inner in value]
        return value

    def _low(self, operator: Operator, place: int | str, tensor: Any) -> Any:
        """A tensor that may be of a lower type: one has come from where no operator was seen to make it."""
        if not isinstance(tensor, Tensor) or tensor.dtype not in WIDE:
            return tensor
        if place in operator.written or operator.is_view or operator.func.namespace == "c10d":
            exactness.entered(tensor)
            if not self._raise_itself(tensor):
                note(f"low precision entered {operator.name}")
            return tensor
        exactness.entered(tensor)
        if operator.base != "lift_fresh":
            note(f"low precision entered {operator.name}")
        return tensor.to(WIDE[tensor.dtype])

    def _raise_itself(self, tensor: Tensor) -> bool:
        """Make the tensor that the script holds one of float64; whether that can be done."""
        if not tensor.is_leaf or tensor._base is not None or tensor.layout is not torch.strided:
            return False
        kind = tensor.dtype
        tensor.data = tensor.detach().to(WIDE[kind])
        self._own.remember(tensor, kind)
        return True

    def _of_type(self, kind: torch.dtype, made: Any) -> None:
        """The script has made a tensor of this type, or has cast one."""
        if isinstance(made, Tensor) and made.dtype is torch.float64:
            self._own.remember(made, kind)
            if is_casting_module() and kind in WIDE and _is_plain(made) and torch.equal(made.float(), made):
                made.copy_(made.to(kind))  # parameters as they were drawn: the initial point is what the script casts

    def _scaler(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a GradScaler calls. torch wants its scale in float32, in which the script's own is exact as well."""
        raised = self._arguments(operator, args, kwargs)[0]
        given = [
            value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in raised
        ]
        result = operator.func(*given, **kwargs)
        for number, value in enumerate(raised):
            if value is not given[number] and number in operator.written:
                value.copy_(given[number])
        return raised[0] if isinstance(result, Tensor) else result


def _is_of_bits(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether integers are read as floats, or floats as integers; bytes are whatever they were made of."""
    integers = [kind for kind in (given, wanted) if not (kind.is_floating_point or kind.is_complex)]
    return len(integers) == 1 and integers[0].itemsize > 1


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has values."""
    return type(tensor) is Tensor and not tensor.is_meta


def _has_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _wide(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results.to(WIDE[results.dtype]) if results.dtype in WIDE else results
    if type(results) in (list, tuple):
        return type(results)([_wide(inner) for inner in results])
    return results


@contextmanager
def wide_by_default() -> Iterator[None]:
    """While open, what is computed of integers and numbers alone is float64. It holds for the process: nothing that
    waits for another rank may be called meanwhile."""
    before = torch.get_default_dtype()
    if before is torch.float64:
        yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
