"""Writing: which forms of a report go where, and that they can before hours are spent on a session."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fsdpcheck.errors import UsageError, explain, writing
from fsdpcheck.report.document_reader import Power
from fsdpcheck.report.forms import junit, markdown, sarif
from fsdpcheck.report.page import require_jinja
from fsdpcheck.session.ledger import Ledger


@dataclass(frozen=True)
class Told:
    """What a form is made of: ``sessions``, the newest last; ``root``, a folder to which files are told relative.

    ``power``: what fsdpcheck power has measured, by adapter, for the page.
    """

    sessions: tuple[Ledger, ...]
    root: str = ""
    power: Power = field(default_factory=dict)

    @property
    def newest(self) -> Ledger:
        return self.sessions[-1]


Form = Callable[[Told], str]


def _page(told: Told) -> str:
    from fsdpcheck.report.page import page  # imports jinja2

    return page.text(told.sessions, told.root, told.power)


FORMS: Final[Mapping[str, tuple[Form, str]]] = {
    "html": (_page, "a page to read, with all in it that it needs"),
    "junit": (lambda told: junit.text(told.newest, told.root), "JUnit XML: a suite an adapter, a case a law"),
    "sarif": (lambda told: _json(sarif.document(told.newest, told.root)), "SARIF 2.1.0: findings at their lines"),
    "markdown": (lambda told: markdown.text(told.newest, told.root), "Markdown, as for the summary of a job"),
}
"""Name of the option -> the form and what it is."""


def require(files: Mapping[str, Path]) -> None:
    """Raise UsageError for a file that could not be written, or two forms in one file, or a page without jinja2."""
    if "html" in files:
        require_jinja()
    taken: dict[Path, str] = {}
    for name, file in files.items():
        whole = file.absolute()
        if whole in taken:
            raise UsageError(explain(f"--{taken[whole]} and --{name} name one file", got=file, then="name two"))
        taken[whole] = name
        if why := _unwritable(whole):
            raise UsageError(explain(f"--{name} {file} cannot be written", got=why, then="name another file"))


def write(files: Mapping[str, Path], told: Told) -> None:
    """Write each form to its file, whole or not at all.

    Raises UsageError for those that could not be written, after the others are.
    """
    wrong = []
    for name, file in files.items():
        try:
            writing.whole(file, FORMS[name][0](told))
        except OSError as error:
            wrong.append(f"--{name} {file}: {error.strerror or error}")
    if wrong:
        raise UsageError(explain("a report cannot be written", got="; ".join(wrong), then="name another file"))


def _unwritable(file: Path) -> str:
    if file.is_dir():
        return "it is a folder"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    for place in (file.parent, *([file] if file.exists() else [])):
        if not os.access(place, os.W_OK):
            return f"{place} is read-only"
    return ""


def _json(data: object) -> str:
    return json.dumps(data, indent=1) + "\n"
