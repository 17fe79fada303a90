"""Exactness of a rank: whether all that it has computed so far is what real arithmetic gives, and where that ended.

What is drawn at random is rounded towards zero to few bits, by its value alone, so that every rank of every number of
ranks draws alike. From then on each operator is proved exact, or exactness ends there. What ranks exchange is looked at
where they meet: a sum is proved, and a rank that has met one whose exactness has ended has none.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision import proofs
from fsdpcheck.comparison.precision.multiples import SHORT, is_short
from fsdpcheck.comparison.precision.operators import Operator
from fsdpcheck.compat.dispatch_private import undispatched
from fsdpcheck.execution import call_sites
from fsdpcheck.execution.recording import Call
from fsdpcheck.simulation import exchange

_WHOLE: Final = frozenset(
    ("bernoulli", "randint", "randint_like", "randperm", "random", "geometric", "poisson", "multinomial")
)
"""Draws that give integers."""
_RANGES: Final = {"uniform": (0.0, 1.0), "rand": (0.0, 1.0), "rand_like": (0.0, 1.0)}
_DEVIATIONS: Final = {"normal": 1.0, "randn": 1.0, "randn_like": 1.0}


class Exactness:
    """Of one rank. ``ended``: by which operator, with file:line; "" while all is exact."""

    def __init__(self) -> None:
        self.ended = ""

    def end(self, what: str) -> None:
        """Something is not proved exact."""
        if not self.ended:
            line = call_sites.line_text(call_sites.line_of(sys._getframe(1)))
            self.ended = f"{what} at {line or 'an unknown place'}"

    def before(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to be called."""
        if self.ended:
            return
        with undispatched(), torch.no_grad():
            if operator.base in ("lift", "lift_fresh") and isinstance(args[0], Tensor) and not is_short(args[0]):
                self.end(_ENTERING)
            elif not proofs.is_exact(operator, args, kwargs):
                self.end(operator.name)

    def made(self, operator: Operator, result: Any) -> None:
        """An operator has made constants."""
        if not self.ended and not operator.name.endswith("fill_.Tensor"):  # which copies what is computed
            with undispatched(), torch.no_grad():
                if not proofs.makes_short(operator, result):
                    self.end(_ENTERING)

    def drawn(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator has drawn numbers: round them."""
        if operator.base in _WHOLE:
            return
        unit = _unit(operator, args, kwargs)
        if unit is None or not isinstance(result, Tensor):
            self.end(operator.name)
        else:
            round_down(result, unit)


_ENTERING: Final = f"numbers of more than {SHORT} bits, which Python or numpy may have rounded, enter"


class _Here(threading.local):
    exactness: Exactness | None = None


_here = _Here()
_ranks: dict[int, Exactness] = {}


def here() -> Exactness | None:
    """That of the rank that this thread is; None where nobody asks for it."""
    return _here.exactness


@contextmanager
def of_rank(rank: int) -> Iterator[Exactness]:
    """While open, this thread is that rank, which begins exact."""
    _here.exactness = _ranks[rank] = Exactness()
    try:
        yield _ranks[rank]
    finally:
        _here.exactness = None


@contextmanager
def where_ranks_meet() -> Iterator[None]:
    """While open, what ranks exchange is looked at; to be opened once, round the whole run."""
    exchange.LISTENERS.append(_met)
    try:
        yield
    finally:
        exchange.LISTENERS.remove(_met)
        _ranks.clear()


def entered(tensor: Tensor) -> None:
    """A tensor has come from where no operator was seen to make it."""
    if _here.exactness is not None and not _here.exactness.ended:
        with undispatched(), torch.no_grad():
            if not is_short(tensor):
                _here.exactness.end(_ENTERING)


def round_down(tensor: Tensor, unit: int) -> Tensor:
    """Make each number a multiple of 2**unit, in place, of no larger absolute value."""
    with undispatched(), torch.no_grad():
        return tensor.mul_(2.0**-unit).trunc_().mul_(2.0**unit)


def unit_of(size: float, bits: int) -> int:
    """The unit of numbers of that size with so many bits."""
    return math.frexp(size)[1] - bits if size else 0


def _unit(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """To multiples of which power of two a draw is rounded: it follows from the distribution alone."""
    in_place = 0 in operator.written
    given = args[1:3] if in_place or operator.func._overloadname in ("float_float",) else ()
    if operator.base in _RANGES:
        low, high = (*given, *(kwargs.get(name) for name in ("from", "to")[len(given) :])) if in_place else (0.0, 1.0)
        ends = (0.0 if low is None else low, 1.0 if high is None else high)
        return unit_of(max(map(abs, ends)), 3) if not any(isinstance(end, Tensor) for end in ends) else None
    if operator.base in _DEVIATIONS:
        if operator.base == "normal":
            if not in_place:
                return None
            deviation = given[1] if len(given) > 1 else kwargs.get("std", 1.0)
            return unit_of(deviation, 2)
        return unit_of(1.0, 2)
    return None


def _met(calls: Mapping[int, Call]) -> None:
    """All sides of a collective, or of a message, have come."""
    known = [_ranks[rank] for rank in calls if rank in _ranks]
    why = next((one.ended for one in known if one.ended), "")
    if not why and not _adds_exactly(list(calls.values())):
        call = next(iter(calls.values())).collective
        why = f"{call.op} {call.reduce_op} at {call.where}"
    if why:
        for one in known:
            one.ended = one.ended or why


def _adds_exactly(calls: list[Call]) -> bool:
    how = calls[0].collective.reduce_op
    if how in ("", "min", "max", "band", "bor", "bxor"):
        return True
    factors = [call.factor for call in calls if call.factor is not None]
    terms = [list(call.inputs) for call in calls]
    with undispatched(), torch.no_grad():
        is_scaled = any(math.frexp(factor)[0] not in (0.5, -0.5) for factor in factors)
        return how in ("sum", "avg") and not is_scaled and proofs.adds_exactly(terms, how == "avg")
