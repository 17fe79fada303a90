"""How a case is refused: one line that names the field."""

from __future__ import annotations

from typing import NoReturn

from fsdpcheck.errors import InvalidCase


def refuse(where: str, got: object, wanted: str, then: str = "") -> NoReturn:
    """Raise InvalidCase: what stands in the field ``where``, cut short, what may stand there, and what to do."""
    text = repr(got)
    shown = f"{text[:80]}..." if len(text) > 80 else text
    raise InvalidCase(f"{where}: got {shown}, wanted {wanted}{f'; {then}' if then else ''}")
