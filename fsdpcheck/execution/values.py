"""Value, Unread and Raised: what passes through the functions of an implementation. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OUTSIDE: Final = -1
"""Number of no step: what is built, loaded or shown."""


@dataclass(frozen=True, slots=True)
class Value:
    """Numbers that a variable of a function has behind one of its lines, where it had others, or none, before.

    ``step``: that is being taken, from 0, or OUTSIDE. ``place``: "file:line". ``function``: its qualified name.
    ``caller``: "file:line function" of the innermost caller in an implementation, "" if there is none. ``name``: of the
    variable, with what is read of it, as "self.grad" or "parts[2]"; "" for what the function returns. ``numbers``:
    flattened. ``returned``: the newest functions that the function had called and that had returned, "file:line
    function", the newest last; the line is the first of the function.
    """

    step: int
    place: str
    function: str
    caller: str
    name: str
    numbers: tuple[float, ...]
    returned: tuple[str, ...] = ()
    is_tensor: bool = True


@dataclass(slots=True)
class Unread:
    """What is not in a run's values although it passed: ``large`` variables, each with more numbers than are noted.

    ``first`` and ``cut``: "file:line function" of the first of them, and of where as many values were noted as a run
    has at most; "" for none.
    """

    large: int = 0
    first: str = ""
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """What was raised in a function of an implementation, and where.

    ``frames``: "file:line function" of functions of an implementation, innermost first. ``returned``: of each of them
    what Value has. ``type``: name of the exception's class.
    """

    type: str
    frames: tuple[str, ...]
    returned: tuple[tuple[str, ...], ...]
