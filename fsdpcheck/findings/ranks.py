"""Ranks of a finding: how each stood when the law broke, and its last calls. Plain data, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

CALLS: Final = 24
"""Calls of a rank that a finding keeps: its last."""
RANKS: Final = 16
"""Ranks that a finding keeps."""
LONGEST: Final = 160
"""Characters of one text of a call."""


@dataclass(frozen=True)
class Call:
    """One call of a rank. Calls of two ranks are one where ``key`` is equal.

    ``key``: group, members, number and tag. ``what``: the call in words. ``members``: global ranks that must come, or
    source and destination. ``where``: file:line of the caller, "" where nobody knows.
    """

    key: str
    op: str
    what: str
    members: tuple[int, ...]
    where: str = ""


@dataclass(frozen=True)
class RankStood:
    """One rank of the run that broke the law.

    ``state``: "finished", "blocked", "raised", "running", or in words. ``blocked_in``: key of the call that has not
    returned, "" where there is none; ``waits_for``: ranks that never came to it. ``where``: file:line of the innermost
    frame outside torch. ``earlier``: calls before those that are kept.
    """

    rank: int
    state: str
    blocked_in: str = ""
    waits_for: tuple[int, ...] = ()
    where: str = ""
    calls: tuple[Call, ...] = ()
    earlier: int = 0

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> RankStood:
        calls = tuple(Call(**{**one, "members": tuple(one["members"])}) for one in data.get("calls", ()))
        return RankStood(**{**data, "calls": calls, "waits_for": tuple(data.get("waits_for", ()))})

    def bounded(self) -> RankStood:
        """The same with no text longer than LONGEST characters, and no more than CALLS calls."""
        calls = tuple(_short(call) for call in self.calls[-CALLS:])
        return dataclasses.replace(
            self,
            state=_cut(self.state),
            blocked_in=_cut(self.blocked_in),
            where=_cut(self.where),
            calls=calls,
            earlier=self.earlier + len(self.calls) - len(calls),
        )


def _short(call: Call) -> Call:
    return dataclasses.replace(
        call,
        key=_cut(call.key),
        op=_cut(call.op),
        what=_cut(call.what),
        where=_cut(call.where),
        members=call.members[:64],
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
