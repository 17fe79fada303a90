"""Executions that one law asked for and another may judge by: laws with equal spaces draw the same cases.

Within one case nothing is given twice: a law that runs a case again, to see that nothing is left of the first time, has
a second run of it. What breaks a law by a remembered execution is judged again by new ones (judging/exploration.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from fsdpcheck.execution import Execution

_KEPT: Final = 512
"""Executions kept, each of some ten kilobytes."""


class Executions:
    """The newest executions, by all that decides them."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Execution] = OrderedDict()
        self._given: set[Hashable] = set()
        self.recalled = 0
        """How many were given since the case began."""

    def begin(self) -> None:
        """Another case is judged."""
        self._given.clear()
        self.recalled = 0

    def recall(self, key: Hashable) -> Execution | None:
        """What ``key`` gave before this case began, the first time that it is asked for in this case."""
        if key in self._given:
            return None
        self._given.add(key)
        execution = self._found.get(key)
        self.recalled += execution is not None
        return execution

    def keep(self, key: Hashable, execution: Execution) -> None:
        self._found[key] = execution
        self._found.move_to_end(key)
        while len(self._found) > _KEPT:
            self._found.popitem(last=False)

    def forget(self) -> None:
        """Nothing that was kept is given any more."""
        self._found.clear()
