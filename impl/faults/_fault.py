"""Fault: one bug planted on purpose, how to switch it on, and which law must catch it.

A fault replaces one attribute of one module (or of a class in it) for the length of a ``with`` block. The package calls
across files through the module, so every caller gets the planted version. ``hits`` counts how often the planted code
made a difference or tried to; a run with 0 hits says nothing about the laws.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]
Hit = Callable[[], None]
Plant = Callable[[Any, Hit], Any]
"""(the original attribute, a function that counts a hit) -> the planted attribute."""


@dataclass
class Fault:
    """``target`` is "module:attribute" or "module:Class.attribute" inside this package, or public and of torch.

    ``plants`` says in a sentence what is wrong then, ``stands_for`` which real bug it is like, ``caught_by`` is a
    pattern (fnmatch) of the names of the laws of which at least one must fail. ``cause`` is a pattern (regular
    expression) of what a right diagnosis says: this mistake, not a kind of mistake or a consequence. ``subject``: the
    implementation that it is planted in.
    """

    name: str
    target: str
    plants: str
    stands_for: str
    caught_by: str
    plant: Plant
    cause: str = ""
    subject: str = "reference"
    hits: int = 0

    def __call__(self) -> AbstractContextManager[Fault]:
        """The fault in place; entering resets ``hits``. Not re-entrant: one copy in a process at a time."""
        return self._planted()

    @contextmanager
    def _planted(self) -> Iterator[Fault]:
        self.hits = 0
        owner, attribute = self._place()
        original = vars(owner)[attribute]
        setattr(owner, attribute, self.plant(original, self._hit))
        try:
            yield self
        finally:
            setattr(owner, attribute, original)

    def _place(self) -> tuple[Any, str]:
        module, _, path = self.target.partition(":")
        *classes, attribute = path.split(".")
        inside = module.partition(".")[0] != "torch"
        owner: Any = importlib.import_module(f"..{module}" if inside else module, __package__)
        for name in classes:
            owner = getattr(owner, name)
        return owner, attribute

    def _hit(self) -> None:
        self.hits += 1


def fault(
    target: str, stands_for: str, caught_by: str, cause: str = "", subject: str = "reference"
) -> Callable[[Plant], Fault]:
    """Make a function ``plant(original, hit) -> planted`` a Fault named like it; its docstring says what it plants."""

    def decorate(plant: Plant) -> Fault:
        plants = " ".join((plant.__doc__ or "").split())
        return Fault(plant.__name__, target, plants, stands_for, caught_by, plant, cause, subject)

    return decorate
