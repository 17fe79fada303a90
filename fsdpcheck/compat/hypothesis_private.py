"""The one place that touches Hypothesis' internals, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hypothesis import statistics
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.engine import ConjectureRunner, ExitReason
from hypothesis.internal.constants_ast import Constants


@contextmanager
def without_local_constants() -> Iterator[None]:
    """Draw without the constants that Hypothesis finds in the source files of the working folder (since 6.131).

    They make the same seed give other cases in a checkout than in an installed package, and after any edit; and they
    leave a ``.hypothesis`` folder where the user happens to be. Does nothing where Hypothesis has no such constants.
    """
    name = "_get_local_constants"
    original = getattr(providers, name, None)
    if original is None:
        yield
        return
    none = Constants()
    setattr(providers, name, lambda: none)
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        setattr(providers, name, original)
        providers.CONSTANTS_CACHE.cache.clear()


@contextmanager
def without_mutations() -> Iterator[None]:
    """Draw without the mutator, which follows most draws by up to five copies of them with parts repeated.

    It hunts for equal values in unequal places, which no law of ours needs, and 60 draws are then some 15 independent
    ones: a kind of layout that one draw in ten has is missed every fifth time. Does nothing where there is no mutator.
    """
    name = "generate_mutations_from"
    original = getattr(ConjectureRunner, name, None)
    if original is None:
        yield
        return
    setattr(ConjectureRunner, name, lambda self, data: None)
    try:
        yield
    finally:
        setattr(ConjectureRunner, name, original)


@contextmanager
def whether_exhausted() -> Iterator[list[str]]:
    """A list that is not empty once Hypothesis has stopped drawing because there was nothing left to draw.

    Tells the cases of a small law, which are all judged, from those of one nearly all of whose draws were rejected.
    """
    ended: list[str] = []

    def note(told: Mapping[str, Any]) -> None:
        ended.extend(["all"] * (told.get("stopped-because") == ExitReason.finished.value))

    with statistics.collector.with_value(note):  # type: ignore[arg-type]
        yield ended
