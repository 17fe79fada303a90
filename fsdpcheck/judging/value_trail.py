"""Where a wrong number comes from: the lines of an implementation that have it first, and those that had the right one.

A run notes the numbers that pass through the functions of an implementation (``program/values.py``). Data are chosen
such that numbers tell what they are, so the function in which a wrong one is seen first is where it is formed, or the
next that is given it. Chance is taken out by further cases that fail: a function is named if it is one of the first to
have the wrong number in each of them, and of one case alone no number is looked for that any other might equal.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from fsdpcheck.execution import Execution
from fsdpcheck.execution.values import OUTSIDE, Raised, Unread, Value
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program.values import NUMBERS, VALUES

_FIRST: Final = 24
"""How many functions are looked at, of those that have a wrong number."""
_TOLD: Final = 2
"""How many of them are told."""
_CLOSE: Final = 2.0**-50
"""How near a square must be: a root is rounded, and so is its square."""
_ORDINARY: Final = 64
"""A number of quarters below this may stand for anything, and so may a whole number below it times a power of two."""
_INNER: Final = re.compile(r"\.<locals>\.<(?:listcomp|dictcomp|setcomp|genexpr|lambda)>")


T = TypeVar("T")


@dataclass(frozen=True)
class Number:
    """A number to look for. ``of``: what of a quantity it is, "" for itself. ``room``: how far off it may be of it."""

    value: float
    of: str = ""
    room: float = 0.0

    def is_in(self, numbers: Sequence[float]) -> bool:
        return any(abs(one - self.value) <= self.room * abs(self.value) for one in numbers)

    @property
    def is_ordinary(self) -> bool:
        is_small = abs(self.value) < _ORDINARY and (4 * self.value).is_integer()
        return is_small or (math.frexp(self.value)[0] * _ORDINARY).is_integer()


@dataclass(frozen=True)
class Sought:
    """What to look for in one rank's step. ``step``: OUTSIDE where it is not known; then in all of them.

    ``tensors``: whether it may be in one, and is not a number of Python.
    """

    rank: int
    step: int
    wrong: tuple[Number, ...]
    right: tuple[Number, ...]
    tensors: bool = True


@dataclass(frozen=True)
class Sight:
    """A number in a function. ``place``: "file:line". ``of``: see Number; ``caller``, ``called``: see Value."""

    function: str
    place: str
    name: str
    number: Number
    caller: str
    called: tuple[str, ...]

    @property
    def where(self) -> tuple[str, str]:
        """(file, function)"""
        return self.place.rpartition(":")[0], self.function


@dataclass(frozen=True)
class Trail:
    """Of one case: the first functions that have a wrong number, and the last before them that had the right one."""

    wrong: tuple[Sight, ...]
    right: Sight | None


def with_square(value: float) -> tuple[Number, ...]:
    """A norm and its square."""
    return Number(value), Number(value * value, "the square of it", _CLOSE)


def of_violation(violation: Violation) -> Sought | None:
    """What a violation says is wrong, if that is a number; None otherwise."""
    got, wanted = _number(violation.got), _number(violation.wanted)
    if got is None or wanted is None:
        return None
    rank, step = re.search(r"rank (\d+)", violation.where), re.search(r"step (\d+)", violation.where)
    return Sought(int(rank[1]) if rank else 0, int(step[1]) if step else OUTSIDE, (Number(got),), (Number(wanted),))


def _number(text: str) -> float | None:
    found = re.match(r"-?\d+(\.\d+)?(e[+-]?\d+)?(?= within |$)", text)
    return float(found[0]) if found else None


def trail(execution: Execution, sought: Sought) -> Trail | None:
    """Where the numbers are seen in one case; None where the wrong one nowhere is, and nor is the right one."""
    if sought.rank >= len(execution.ranks):
        return None
    values = [one for one in execution.ranks[sought.rank].values if _is_of(one, sought)]
    wrong: dict[tuple[str, str], Sight] = {}
    begins = len(values)
    for at, sight in _sights(values, sought.wrong):
        begins = min(begins, at)
        wrong.setdefault(sight.where, sight)
        if len(wrong) == _FIRST:
            break
    right = [sight for _, sight in _sights(values[:begins], sought.right)]
    if not wrong and not right:
        return None
    return Trail(tuple(wrong.values()), right[-1] if right else None)


def _is_of(value: Value, sought: Sought) -> bool:
    if value.is_tensor and not sought.tensors:
        return False
    return value.step != OUTSIDE and sought.step in (OUTSIDE, value.step)


def _sights(values: Sequence[Value], numbers: Collection[Number]) -> Iterator[tuple[int, Sight]]:
    """(place among ``values``, sight) of each of ``numbers`` but zero, in the order in which they were seen."""
    known = [number for number in numbers if number.value]
    for at, one in enumerate(values):
        found = next((number for number in known if number.is_in(one.numbers)), None)
        if found is not None:
            function = _INNER.split(one.function)[0]
            yield at, Sight(function, one.place, one.name, found, one.caller, one.returned)


def common(trails: Sequence[Trail]) -> Trail | None:
    """What the trails of several cases have in common, as the first of them has it; None for nothing.

    A number that may stand for anything counts where no case has one that does not, if it is not the same in all.
    """
    wrong = _first_in_all(_telling([(one, one.wrong[0]) for one in trails if one.wrong]))
    before = [one for one in trails if one.wrong] or trails  # else it may be what was right beside it
    lasts = _telling([(one.right, one.right) for one in before if one.right is not None])
    right = lasts[0] if lasts and all(_alike(lasts[0], sight) for sight in lasts) else None
    return Trail(wrong, right) if wrong or right is not None else None


def _telling(found: Sequence[tuple[T, Sight]]) -> list[T]:
    """Of what has a number those that no chance can explain."""
    sure = [one for one, sight in found if not sight.number.is_ordinary]
    if sure or len({abs(sight.number.value) for _, sight in found}) > 1:
        return sure or [one for one, _ in found]
    return []


def _first_in_all(trails: Sequence[Trail]) -> tuple[Sight, ...]:
    if not trails:
        return ()
    first, *others = trails
    shared = [sight for sight in first.wrong if all(any(sight.where == x.where for x in one.wrong) for one in others)]
    return tuple(shared[:_TOLD])


def _alike(one: Sight, other: Sight) -> bool:
    return (one.where, _function(one.caller)) == (other.where, _function(other.caller))


def _function(line: str) -> str:
    return line.partition(" ")[2]


def in_words(trail: Trail) -> str:
    """A trail in lines."""
    words = []
    if trail.right is not None:
        words.append(f"the right value is last seen at {_told(trail.right)}{_called_at(trail.right)}")
    for number, sight in enumerate(trail.wrong):
        before = "the value that it has is first seen at" if number == 0 else "then at"
        words.append(f"{before} {_told(sight)}")
        if number == 0 and sight.called:
            words.append(f"behind its calls of {'; '.join(map(_of_function, sight.called))}")
    return "\n".join(words)


def of_raised(raised: Raised) -> str:
    """The functions through which something was raised, and what these had called by then."""
    words = []
    for number, (frame, returned) in enumerate(zip(raised.frames, raised.returned, strict=True)):
        words.append(f"{'raised' if number == 0 else 'called'} at {line_of(frame)}")
        if returned:
            words.append(f"behind its calls of {'; '.join(map(_of_function, returned))}")
    return "\n".join(words)


def of_unread(unread: Unread) -> str:
    """What of a run a trail was not looked for in; "" where it was in all."""
    words = []
    if unread.large:
        many = "one variable" if unread.large == 1 else f"{unread.large} variables"
        words.append(f"{many} of over {NUMBERS} numbers, the first at {line_of(unread.first)}")
    if unread.cut:
        words.append(f"what came behind {VALUES} values, at {line_of(unread.cut)}")
    return f"not looked at for this: {'; '.join(words)}" if words else ""


def _told(sight: Sight) -> str:
    of = f", {sight.number.of}" if sight.number.of else ""
    held = f" (in {sight.name}{of})" if sight.name else f" (returned{of})"
    return f"{line_of(f'{sight.place} {sight.function}')}{held}"


def _called_at(sight: Sight) -> str:
    return f", called at {line_of(sight.caller)}" if sight.caller else ""


def _of_function(line: str) -> str:
    place, _, function = line.partition(" ")
    return f"{function} ({place})"


def line_of(at: str) -> str:
    """ "file:line in function: its source text" of "file:line function", as far as they are known."""
    place, _, function = at.partition(" ")
    file, _, number = place.rpartition(":")
    text = linecache.getline(file, int(number)).partition("  # ")[0].strip() if number.isdecimal() else ""
    return place + (f" in {function}" if function else "") + (f": {text}" if text else "")
