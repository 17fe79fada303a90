"""Agenda: what is left of a session to check, handed out pair by pair, to one process or to several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdpcheck.errors import NO_PROGRESS, USAGE
from fsdpcheck.findings.verdict import INEXACT, NOT_CHECKED, Verdict
from fsdpcheck.judging import order

Pair = tuple[str, str]
"""(law, adapter), both by name."""


class Agenda:
    """Gives each pair once, in order, leaders (judging/order.py) of an adapter first; no other before their verdicts.

    ``needing``: of each adapter the laws that need it to build, to step and to show its parameters. ``spaces``: by law
    what names its space of cases: one process judges the laws of a space one after another, for they share executions.
    """

    def __init__(
        self, pairs: Iterable[Pair], needing: Mapping[str, Iterable[str]], spaces: Mapping[str, str] | None = None
    ) -> None:
        self._spaces, self._begun = spaces or {}, set[Pair]()
        self._left = sorted(pairs, key=lambda pair: order.rank(pair[0]))
        adapters = list(dict.fromkeys(adapter for _, adapter in self._left))
        self._left.sort(key=lambda pair: adapters.index(pair[1]))
        self._awaited = {pair for pair in self._left if pair[0] in order.LEADERS}
        self._needing = {adapter: frozenset(laws) for adapter, laws in needing.items()}
        self._led: dict[str, list[Verdict]] = {}

    def take(self, after: Pair | None = None) -> Pair | None:
        """The next pair for a process that has judged ``after``; None where none is left, or none before a verdict."""
        closed = {adapter for _, adapter in self._awaited}
        there = [pair for pair in self._left if pair in self._awaited or pair[1] not in closed]
        alike = [pair for pair in there if after is not None and self._space(pair) == self._space(after)]
        new = [pair for pair in there if self._space(pair) not in self._begun]
        found = next(iter(alike or new or there), None)
        if found is not None:
            self._left.remove(found)
            self._begun.add(self._space(found))
        return found

    def _space(self, pair: Pair) -> Pair:
        """The space of cases that is judged, on the adapter."""
        return self._spaces.get(pair[0], pair[0]), pair[1]

    def __len__(self) -> int:
        """How many are left."""
        return len(self._left)

    def give_up(self) -> None:
        """Nothing is left."""
        self._left.clear()

    def hear(self, verdict: Verdict) -> list[Verdict]:
        """Take in a verdict; returns those on what it leaves out: errors that say so.

        An adapter whose ranks never came back is asked nothing more: each law would take its whole budget. One that
        met one error in its first case of every leader (it breaks its protocol, say, or calls what no engine offers) is
        asked no law that would meet it again; nor is a model of a user's of which no case of a leader is exact. Another
        error ends the law that met it alone.
        """
        self._awaited.discard(pair := (verdict.law, verdict.adapter))
        own = [left for left in self._left if left[1] == verdict.adapter]
        if verdict.status == "error" and verdict.exit_code == NO_PROGRESS:
            return self._leave_out(own, f"its ranks made no progress in {verdict.law}", NO_PROGRESS)
        if pair[0] not in order.LEADERS:
            return []
        led = self._led.setdefault(verdict.adapter, [])
        led += [verdict] if verdict.status not in ("not promised", "not asked") else []
        if any(adapter == verdict.adapter for _, adapter in self._awaited) or not _is_of_all(led):
            return []
        needing = [left for left in own if left[0] in self._needing.get(left[1], ())]
        why = "the error of {} ends every case" if led[0].status == "error" else "no case of {} is exact"
        return self._leave_out(needing, why.format(led[0].law), USAGE)

    def _leave_out(self, vain: list[Pair], why: str, code: int) -> list[Verdict]:
        self._left = [pair for pair in self._left if pair not in vain]
        self._awaited.difference_update(vain)
        return [Verdict(*pair, "error", reason=f"{NOT_CHECKED}: {why}", exit_code=code) for pair in vain]


def _is_of_all(led: list[Verdict]) -> bool:
    """Whether these verdicts are one error, met before anything could be judged, or that a user's model has no case."""
    if not led or any(one.exit_code != USAGE or one.cases for one in led):
        return False
    if all(one.status == "no case" and INEXACT in one.reason for one in led):
        return True
    return all(one.status == "error" for one in led) and len({one.root for one in led}) == 1
