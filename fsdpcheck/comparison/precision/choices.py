"""Choices: operators that give whole numbers or truths of floats. What one of them gives is not continuous.

Where values are tied, or nearly so, rounding decides which an ``argmax`` chooses; noise then moves all that follows by
as much as a mistake would. So what they give is kept, and it can be told which of them noise has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision.operators import Operator
from fsdpcheck.comparison.record import Choice
from fsdpcheck.execution import call_sites

_STEPS: Final = frozenset(("ceil", "floor", "heaviside", "round", "sgn", "sign", "trunc"))
"""They give floats that are whole numbers."""
_CHOOSE: Final = """
argmax argmin argsort bucketize eq ge gt isin kthvalue le lt max max_pool2d_with_indices max_pool3d_with_indices median
min mode ne nonzero searchsorted sort topk _to_copy
"""
SEEN: Final = _STEPS | frozenset(_CHOOSE.split())
"""Names of the operators that may choose."""
_MANY: Final = 1 << 14
"""How many choices of a rank are kept."""
_NUMBERS: Final = 1 << 22
"""Of how many numbers, together."""


class Choices:
    """What operators of one rank have chosen so far, in their order."""

    def __init__(self) -> None:
        self.made: list[Choice] = []
        self._left = _NUMBERS

    def see(self, operator: Operator, args: tuple[Any, ...], result: Any) -> None:
        """An operator of SEEN has given ``result``."""
        if len(self.made) == _MANY or not args or not _is_of_floats(args[0]):
            return
        for chosen in _whole_numbers(result, operator.base in _STEPS):
            if chosen.numel() <= self._left:
                self._left -= chosen.numel()
                line = call_sites.line_text(call_sites.line_of(sys._getframe(1)))
                self.made.append(Choice(operator.base, line, chosen.detach().reshape(-1).to(torch.int64)))


def _is_of_floats(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.is_floating_point() and not value.is_meta


def _whole_numbers(result: Any, are_floats: bool) -> Iterator[Tensor]:
    for inner in result if isinstance(result, tuple | list) else (result,):
        if isinstance(inner, Tensor) and not inner.is_complex() and inner.is_floating_point() is are_floats:
            yield inner
