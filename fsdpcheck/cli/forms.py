"""Options of every command that tells of a session: how much is printed, and which files are written beside."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.report import colour, summary, writing
from fsdpcheck.report.document_reader import Power
from fsdpcheck.report.forms import github
from fsdpcheck.report.writing import Told
from fsdpcheck.session.ledger import Ledger

Ending = Callable[[Ledger, colour.Paint], str]
"""What is printed of a session."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    for name, (_, what) in writing.FORMS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what} (default: none)")
    told = "print annotations for GitHub, at your own lines, behind the report"
    parser.add_argument("--github", action="store_true", help=told)
    more = "a row a law, and the names of laws that are not promised (default: a line a chapter)"
    parser.add_argument("--verbose", "-v", action="store_true", help=more)


def files(options: argparse.Namespace) -> dict[str, Path]:
    """Name of a form -> the file that it goes to, of those that are asked for."""
    wanted = {name: getattr(options, name) for name in writing.FORMS}
    return {name: file for name, file in wanted.items() if file is not None}


def require(options: argparse.Namespace) -> None:
    """Raise UsageError for files that could not be written, before anything takes long."""
    wanted = files(options)
    writing.require(wanted)
    report = getattr(options, "json", None)
    if report is not None and report.absolute() in {file.absolute() for file in wanted.values()}:
        raise UsageError(explain("--json names the file of another form", got=report, then="name two files"))


def tell(
    options: argparse.Namespace, sessions: Sequence[Ledger], power: Power | None = None, ending: Ending | None = None
) -> None:
    """Print the newest of ``sessions``, the last, its annotations if they are asked for, and write the files.

    ``ending``: in whose words, those of ``run`` by default.
    """
    root, paint = os.environ.get("GITHUB_WORKSPACE", ""), colour.painter(sys.stdout)
    try:
        newest = sessions[-1]
        print(ending(newest, paint) if ending else summary.ending(newest, paint, options.verbose), flush=True)
        if options.github:
            print("\n".join(github.lines(sessions[-1], root)), flush=True)
    finally:  # each is a copy of the findings; failing to give one does not lose the others
        writing.write(files(options), Told(tuple(sessions), root, power or {}))
