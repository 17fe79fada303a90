"""Drawing: batches of cases from Hypothesis, drawn without judging any; what breaks a law is shrunk in its batch.

To draw is cheap and to judge is dear, so more is drawn than is judged (judging/selection.py). A batch is the same
wherever it is drawn, whatever became of the cases of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hypothesis.errors import Unsatisfiable

from fsdpcheck.case import Case
from fsdpcheck.judging.selection import spread
from fsdpcheck.strategies import enumeration

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_KEPT: Final = 8
"""Batches kept: laws of one space are judged in a row."""


@dataclass(frozen=True)
class Drawn:
    """Cases of a batch in the order in which they are judged, equal ones too. ``all_there_are``: nothing else is."""

    cases: tuple[Case, ...]
    all_there_are: bool


@dataclass(frozen=True)
class Batch:
    """``count`` cases of a strategy, those of one seed; the first ``spread_over`` are to differ in all they can."""

    strategy: SearchStrategy[Case]
    count: int
    seed: int
    spread_over: int

    def draw(self) -> Drawn:
        """The cases; none where the strategy finds none."""
        cases: list[Case] = []
        try:
            ended = enumeration.each(self.strategy, self.count, self.seed, cases.append)
        except Unsatisfiable:
            return Drawn((), False)
        if self.spread_over < len(cases):
            cases = spread(cases, self.spread_over)
        return Drawn(tuple(cases), ended)

    def shrink(self, case: Case, judge: Callable[[Case], None]) -> None:
        """Have ``judge`` called on ``case``, one of the batch, and on smaller ones once it has raised.

        Raises what the smallest raised, Hypothesis' Flaky among it; returns where nothing was raised.
        """
        enumeration.smaller(self.strategy, self.count, self.seed, case, judge)


class Drawings:
    """The newest batches that were drawn, by what decides them."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Drawn] = OrderedDict()

    def of(self, key: Hashable, batch: Batch) -> Drawn:
        """The cases of ``batch``, drawn unless ``key`` had them before."""
        if key not in self._found:
            self._found[key] = batch.draw()
        self._found.move_to_end(key)
        while len(self._found) > _KEPT:
            self._found.popitem(last=False)
        return self._found[key]
