"""Excerpts: texts of an implementation as they are kept, never without end, and as they are printed, never raw.

What an implementation raises, names or says may be of any length and hold what a terminal obeys.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Mapping
from typing import Any, Final, TypeVar

MOST: Final = 4_000
"""Characters kept of one text: half of them from its head and half from its tail, each about a screen of 25 lines."""

WHOLE: Final = 64 * 1_000
"""Characters kept of a report that tells of every rank: there are 64 at most (case.rules), a thousand for each."""

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
"""Control characters but tab and line feed; marks that turn or hide what stands beside them; halves of characters."""

Data = TypeVar("Data")


def excerpt(text: str, most: int = MOST) -> str:
    """``text``, or its head and tail and how much is left away between them, ``most`` characters and a line."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left away ...\n{text[-half:]}"


def said(error: BaseException) -> str:
    """What an exception says, as an excerpt; also of one whose ``__str__`` raises."""
    try:
        return excerpt(str(error))
    except Exception as broken:
        return f"<{kind(error)}, whose __str__ raises {kind(broken)}>"


def kind(error: BaseException) -> str:
    """The name of its class, as an excerpt; a name that is empty is told as such."""
    return excerpt(type(error).__name__) or "<a class without a name>"


def told(error: BaseException) -> str:
    """Its kind and what it says, as the last lines of a traceback, as an excerpt."""
    lines = "".join(traceback.format_exception_only(error))
    return excerpt(lines if lines.strip() else kind(error) + "\n")


def visible(text: str) -> str:
    """``text`` with what a terminal would obey written out: an escape is the four characters ``\\x1b``."""
    return _OBEYED.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def shown(data: Data) -> Data:
    """``data`` with every text in it visible: a text, or a dataclass, mapping, list or tuple that holds some."""
    found: Any = data
    if isinstance(found, str):
        found = visible(found)
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = dataclasses.replace(found, **{name: shown(value) for name, value in vars(found).items()})
    elif isinstance(found, Mapping):
        found = {shown(name): shown(value) for name, value in found.items()}
    elif isinstance(found, list | tuple):
        found = type(found)(shown(value) for value in found)
    return found  # type: ignore[no-any-return]
