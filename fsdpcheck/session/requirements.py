"""Requirements: laws that a session has to have judged, whatever its adapters promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from fsdpcheck.errors import explain, spelling
from fsdpcheck.session.ledger import Ledger

_UNJUDGED: Final = ("not promised", "not asked")


def lacking(
    ledger: Ledger, globs: Sequence[str], laws: Iterable[str], where: Callable[[str], str] = lambda glob: ""
) -> list[str]:
    """A sentence for each adapter and glob that asks for more of ``laws`` than was judged; what broke was judged.

    ``where`` a glob is written, "" where nobody knows: one that no law matches is shown with its place.
    """
    known, told = tuple(laws), []
    for glob in globs:
        wanted = [law for law in known if fnmatchcase(law, glob)]
        told += [unknown(glob, known, where(glob))] if not wanted else []
        for ref in ledger.plan.adapters if wanted else ():
            left = [f"{law} ({why})" for law in wanted if (why := _why(ledger, law, ref))]
            told += [f"required is {glob!r}, and not judged on {ref}: {', '.join(left)}"] if left else []
    return told


def unknown(glob: str, laws: Iterable[str], where: str = "") -> str:
    """The sentence for a glob that none of ``laws`` matches, with the name that may be meant; "" where one does."""
    known = tuple(laws)
    if any(fnmatchcase(law, glob) for law in known):
        return ""
    what = f"required is {glob!r}, and no law that could be judged matches"
    hint = spelling.hint_of_glob(glob, known)
    return explain(f"{what}.{hint}" if hint else what, where=where)


def _why(ledger: Ledger, law: str, ref: str) -> str:
    """Why there is no verdict that counts; "" where there is one."""
    verdict = ledger.verdicts.get((law, ref))
    if verdict is None:
        return "not among the chosen checks, or not reached"
    return f"{verdict.status}: {verdict.reason}" if verdict.status in _UNJUDGED else ""
