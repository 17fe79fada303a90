"""Monte Carlo arithmetic: what a rounding operator gives, and a reducing one is given, times 1 + u, |u| <= eps.

The error of a dot product is about eps times the sum of |a b|. Noise of its result alone would be small where terms
cancel, so its inputs get noise as well; they are copied for that.

Noise is a function of the seed, the operator and the values that it meets, and of nothing else: ranks that hold the
same values as replicas compute the same, and stay bit equal; what is computed again in a backward is the same again;
and the script's own random numbers are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision.operators import Operator

_POOL: Final = 1 << 20
_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_SAME_SIZE: Final = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""The types that get noise, and integers of their size."""


class Noise:
    """The noise of one run, which all of its ranks share. ``seed``: of its uniform numbers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[torch.dtype, Tensor] = {}

    def inputs(self, operator: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a reducing operator, with copies in the place of what is added up."""
        count = len(args)
        numbers = [number for number in operator.inputs if number < count]
        key = operator.salt
        for number in numbers:
            key += _digest(args[number])
        given = list(args)
        for number in numbers:
            if number not in operator.written:
                given[number] = self._copy(args[number], key + number)
        return tuple(given)

    def _copy(self, value: Any, key: int) -> Any:
        if isinstance(value, Tensor):
            if not _may_be_inexact(value):
                return value
            return torch.addcmul(value, value, self._uniform(value, key), value=torch.finfo(value.dtype).eps)
        if isinstance(value, list | tuple):
            return [self._copy(inner, key + place) for place, inner in enumerate(value)]
        return value

    def results(self, operator: Operator, args: tuple[Any, ...], results: Any) -> None:
        """Change what a rounding operator has given, or has written, in place. Those on lists give nothing back."""
        if results is None:
            for number in operator.written:
                if isinstance(number, int) and number < len(args):
                    self._shake_all(args[number], operator.salt + number)
        else:
            self._shake_all(results, operator.salt)

    def _shake_all(self, values: Any, salt: int) -> None:
        if isinstance(values, Tensor):
            self._shake(values, salt)
        elif isinstance(values, list | tuple):
            for place, inner in enumerate(values):
                if isinstance(inner, Tensor):
                    self._shake(inner, salt + place)

    def _shake(self, tensor: Tensor, salt: int) -> None:
        if not _may_be_inexact(tensor):
            return
        noise = self._uniform(tensor, salt + _digest(tensor))
        tensor.addcmul_(tensor, noise, value=torch.finfo(tensor.dtype).eps)

    def _uniform(self, tensor: Tensor, key: int) -> Tensor:
        """Numbers of U(-1, 1), of the shape and the type of the tensor."""
        mixed = ((key ^ self._seed) * _MIX) & _WORD
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed ^= mixed >> 32
        count = tensor.numel()
        if count > _POOL:
            generator = torch.Generator().manual_seed(mixed >> 1)
            return torch.empty(tensor.shape, dtype=tensor.dtype).uniform_(-1, 1, generator=generator)
        pool = self._pools.get(tensor.dtype)
        if pool is None:
            pool = self._pools[tensor.dtype] = self._drawn(tensor.dtype)
        return pool[(first := mixed % _POOL) : first + count].view(tensor.shape)

    def _drawn(self, kind: torch.dtype) -> Tensor:
        """Twice as many as needed, so that each of the first half may be the first."""
        generator = torch.Generator().manual_seed(self._seed)
        once = torch.empty(_POOL, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        return torch.cat((once, once)).to(kind)


def _digest(value: Any) -> int:
    """A number that follows from the bits of a tensor, or of several."""
    if isinstance(value, Tensor):
        if value.dtype not in _SAME_SIZE or value.is_meta or value.layout is not torch.strided:
            return 0
        return int(value.view(_SAME_SIZE[value.dtype]).sum())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(_digest(inner) for inner in value)
    return 0


def _may_be_inexact(tensor: Tensor) -> bool:
    """Not so one number that is an integer: steps and scales are counted, which is exact."""
    if tensor.dtype not in _SAME_SIZE or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    count = tensor.numel()
    return count > 1 or (count == 1 and not float(tensor.item()).is_integer())
