"""Requirements: laws that a session has to have judged, whatever its adapters promise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from fsdpcheck.session.ledger import Ledger

_UNJUDGED: Final = ("not promised", "not asked")


def lacking(ledger: Ledger, globs: Sequence[str], laws: Iterable[str]) -> list[str]:
    """A sentence for each adapter and glob that asks for more of ``laws`` than was judged; what broke was judged."""
    known, told = tuple(laws), []
    for glob in globs:
        wanted = [law for law in known if fnmatchcase(law, glob)]
        if not wanted:
            told.append(f"required is {glob!r}, and no law that could be judged matches")
        for ref in ledger.plan.adapters if wanted else ():
            left = [f"{law} ({why})" for law in wanted if (why := _why(ledger, law, ref))]
            told += [f"required is {glob!r}, and not judged on {ref}: {', '.join(left)}"] if left else []
    return told


def _why(ledger: Ledger, law: str, ref: str) -> str:
    """Why there is no verdict that counts; "" where there is one."""
    verdict = ledger.verdicts.get((law, ref))
    if verdict is None:
        return "not among the chosen checks, or not reached"
    return f"{verdict.status}: {verdict.reason}" if verdict.status in _UNJUDGED else ""
