"""Places: at which file and line of the user's own code a finding is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fsdpcheck import adapters
from fsdpcheck.findings.verdict import Finding
from fsdpcheck.session.ledger import Ledger

_LINE = re.compile(r"(?P<file>[^\n]+?):(?P<line>\d{1,7})(?=[-, ]|$)")


@dataclass(frozen=True)
class Place:
    """A file, with slashes, relative to the root where it is inside; ``line`` is None where no line is known."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


def of_finding(finding: Finding, ledger: Ledger, root: str = "") -> Place | None:
    """The first line that only failing cases run, else where it failed, else the adapter's file; None for neither.

    ``root``: folder to which files are told relative; "" is the one in which the session ran.
    """
    root = root or ledger.folder
    for text in (finding.lines, finding.place):
        if (found := _LINE.match(text)) is not None:
            return Place(_relative(found["file"], ledger.folder, root), int(found["line"]))
    return of_adapter(finding.adapter, ledger, root)


def of_adapter(ref: str, ledger: Ledger, root: str = "") -> Place | None:
    """The file of an adapter; None for one that comes with fsdpcheck, and where no file of that name was loaded."""
    root = root or ledger.folder
    target, colon, _ = ref.rpartition(":")
    if not colon or adapters.is_builtin(ref):
        return None
    if target.endswith(".py"):
        return Place(_relative(target, ledger.folder, root))
    endings = tuple(f"/{target.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
    found = next((file for file in _loaded(ledger.sources) if file.endswith(endings)), None)
    return None if found is None else Place(_relative(found, ledger.folder, root))


def _loaded(sources: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Files that were loaded by the sessions, with slashes."""
    for one in sources.values():
        files = one.get("files", {})
        yield from (PurePath(file).as_posix() for file in files if isinstance(file, str))


def _relative(file: str, folder: str, root: str) -> str:
    """``file``, which may be relative to ``folder``, relative to ``root`` where it is inside. No disk is read."""
    whole = os.path.normpath(os.path.join(folder, file))
    inside = root and PurePath(whole).is_relative_to(root)
    return PurePath(os.path.relpath(whole, root) if inside else whole).as_posix()
