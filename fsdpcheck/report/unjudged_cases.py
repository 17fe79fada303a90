"""Unjudged cases: the kinds of which no case was judged, so that "holds" says nothing of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from fsdpcheck.session.ledger import Ledger

_NAMED: Final = 3
"""Laws that a line names; more are counted."""


def avoided(traits: Iterable[str], option: str = "--avoid") -> list[str]:
    """A line with the traits that the user avoids; none where there are none."""
    names = ", ".join(traits)
    return [f"avoided, so in no case of any adapter: {names} ({option})"] if names else []


def never(verdicts: Iterable[tuple[str, str, Sequence[str]]]) -> list[str]:
    """A line for each adapter and kind of cases, of (adapter, law, kinds of cases of which it judged none)."""
    laws: dict[tuple[str, str], list[str]] = {}
    for adapter, law, kinds in verdicts:
        for kind in kinds:
            laws.setdefault((adapter, kind), []).append(law)
    return [f"{adapter}: never judged: {kind}, in {_some(names)}" for (adapter, kind), names in laws.items()]


def of_session(ledger: Ledger) -> str:
    """Both, of a session: of all that holds."""
    holds = [each for each in ledger.verdicts.values() if each.status == "holds"]
    lines = never((each.adapter, each.law, each.never) for each in holds)
    more = ["(law by law: never in --json)"] * bool(lines)
    return "\n".join([*avoided(ledger.plan.avoid), *lines, *more])


def _some(names: list[str]) -> str:
    left = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {left} more" if left > 0 else "")
