"""Monte Carlo arithmetic: what a rounding operator gives, and a reducing one is given, times 1 + u, |u| <= eps.

The error of a dot product is about eps times the sum of |a b|. Noise of its result alone would be small where terms
cancel, so its inputs get noise as well; they are copied for that.

Noise is a function of the seed, the operator and the values that it meets, and of nothing else: ranks that hold the
same values as replicas compute the same, and stay bit equal; what is computed again in a backward is the same again;
and the script's own random numbers are left alone. What a collective adds up has the noise of the operators that made
it, which is each rank's own where their values are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision.operators import Operator

_SMALLEST, _LARGEST = 17, 22
"""Powers of two: how many uniform numbers are kept, and of which size on a tensor has numbers of its own."""
_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_HALVES: Final = (torch.bfloat16, torch.float16)
_EPS: Final = {kind: torch.finfo(kind).eps for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
"""The types that get noise, and how large it may be."""


class Noise:
    """The noise of one rank. ``seed``: of its uniform numbers; equal seeds are equal noise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

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
            return torch.addcmul(value, value, self._uniform(value, key), value=_EPS[value.dtype])
        if isinstance(value, list | tuple):
            return [self._copy(inner, key + place) for place, inner in enumerate(value)]
        return value

    def results(self, operator: Operator, args: tuple[Any, ...], results: Any) -> None:
        """Change what a rounding operator has given, or has written, in place. Those on lists give nothing back."""
        if results is None:
            for number in operator.written:
                if isinstance(number, int) and number < len(args):
                    self.shake(args[number], operator.salt + number)
        else:
            self.shake(results, operator.salt)

    def shake(self, values: Any, salt: int) -> None:
        """Change tensors in place. ``salt``: a number of the operator that has made them."""
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
        tensor.addcmul_(tensor, noise, value=_EPS[tensor.dtype])

    def _uniform(self, tensor: Tensor, key: int) -> Tensor:
        """Numbers of U(-1, 1), of the shape and the type of the tensor."""
        mixed = ((key ^ self._seed) * _MIX) & _WORD
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed ^= mixed >> 32
        count = tensor.numel()
        size = max(_SMALLEST, count.bit_length())
        if size > _LARGEST:
            return _drawn(mixed >> 1, count).to(tensor.device, tensor.dtype).view(tensor.shape)
        pool = _pool(self._seed, size, tensor.dtype, tensor.device)
        first = mixed & ((1 << size) - 1)
        if tensor.is_contiguous():
            return torch.as_strided(pool, tensor.shape, tensor.stride(), first)
        return pool[first : first + count].view(tensor.shape)


@functools.lru_cache(maxsize=8)
def _pool(seed: int, size: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """2 ** size numbers of U(-1, 1), twice, so that each may be the first; the same numbers on every device."""
    once = _drawn(seed, 1 << size)
    return torch.cat((once, once)).to(device, kind)


def _drawn(seed: int, count: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.empty(count, dtype=torch.float64, device="cpu").uniform_(-1, 1, generator=generator)


def _digest(value: Any) -> int:
    """A number that follows from the values of a tensor, or of several, and from nothing else."""
    if isinstance(value, Tensor):
        if value.dtype not in _EPS or value.is_meta or value.layout is not torch.strided:
            return 0
        total = value.sum(dtype=torch.float32) if value.dtype in _HALVES else value.sum()
        number = total.item()
        return hash(number) if number == number else 1  # of NaN it would be another each time
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(_digest(inner) for inner in value)
    return 0


def _may_be_inexact(tensor: Tensor) -> bool:
    """Not so one number that is an integer: steps and scales are counted, which is exact."""
    if tensor.dtype not in _EPS or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    count = tensor.numel()
    return count > 1 or (count == 1 and not float(tensor.item()).is_integer())
