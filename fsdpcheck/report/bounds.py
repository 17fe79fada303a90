"""Reached: how near the judged cases of a law that bounds something came to its bound."""

from __future__ import annotations

from fsdpcheck.session.ledger import Ledger


def of_session(ledger: Ledger) -> str:
    """A line for each law that holds, adapter and kind of case."""
    holds = [each for each in ledger.verdicts.values() if each.status == "holds"]
    return "\n".join(f"{each.law} on {each.adapter}, {text}" for each in holds for text in each.reached)
