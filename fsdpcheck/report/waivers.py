"""What of a session is waived (session/waivers.py), in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fsdpcheck.findings.verdict import Finding
from fsdpcheck.session.ledger import Ledger


def sentences(ledger: Ledger) -> list[str]:
    """One a waiver that covers findings of the session."""
    counts = Counter(ledger.waived.get(found.token, "") for found in ledger.findings)
    return [f"WAIVED: {n} finding{'s' * (n > 1)}: {waiver}" for waiver, n in counts.items() if waiver]


def of_root(group: Sequence[Finding], ledger: Ledger) -> str:
    """The waivers of findings of one root, and what of it they leave out; "" where none is waived."""
    told = [waiver for waiver in dict.fromkeys(ledger.waived.get(one.token, "") for one in group) if waiver]
    red = [one.law for one in group if one.token not in ledger.waived]
    return "; ".join([*told, *([f"not waived: {', '.join(red)}"] if told and red else [])])
