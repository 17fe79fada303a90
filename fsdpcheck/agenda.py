"""Agenda: what is left of a session to check, handed out pair by pair, to one process or to several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from fsdpcheck.errors import NO_PROGRESS, USAGE
from fsdpcheck.verdict import NOT_CHECKED, Verdict

Pair = tuple[str, str]
"""(law, adapter), both by name."""


class Agenda(Iterator[Pair]):
    """Gives each pair once, in order, until there is none."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._left = deque(pairs)

    def __next__(self) -> Pair:
        if not self._left:
            raise StopIteration
        return self._left.popleft()

    def __len__(self) -> int:
        """How many are left."""
        return len(self._left)

    def give_up(self) -> None:
        """Nothing is left."""
        self._left.clear()

    def without(self, verdict: Verdict) -> list[Verdict]:
        """Leave out what ``verdict`` makes vain: of an adapter that broke its protocol, or whose ranks never came back.

        Returns the verdicts on what is left out: errors that say so.
        """
        why = {USAGE: "the adapter broke its protocol", NO_PROGRESS: "its ranks made no progress"}
        if verdict.status != "error" or verdict.exit_code not in why:
            return []
        vain = [law for law, adapter in self._left if adapter == verdict.adapter]
        self._left = deque(pair for pair in self._left if pair[1] != verdict.adapter)
        reason = f"{NOT_CHECKED}: {why[verdict.exit_code]} in {verdict.law}"
        return [Verdict(law, verdict.adapter, "error", reason=reason, exit_code=verdict.exit_code) for law in vain]
