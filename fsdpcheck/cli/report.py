"""``fsdpcheck report``: sessions that were kept by --json, told again in any form, offline."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from fsdpcheck.cli import forms
from fsdpcheck.errors import HOLDS, UsageError
from fsdpcheck.report import document_reader

_EPILOG = """examples:
  fsdpcheck report report.json                                   what run printed; -v for a row a law
  fsdpcheck report report.json --html page.html                  a page to read
  fsdpcheck report night.json report.json --html page.html       with a history: of several, the newest is told
  fsdpcheck report report.json --junit junit.xml --sarif fsdpcheck.sarif --markdown summary.md --github
  fsdpcheck report --schema                                      the JSON Schema of these files
exit codes: 0 told, whatever it says   2 a file that is no report, or cannot be written"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    report = commands.add_parser(
        "report",
        help="tell kept sessions in another form: HTML, JUnit, SARIF, Markdown, GitHub",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.set_defaults(command=_report)
    what = "what run --json or gate --json wrote; several are a history"
    report.add_argument("reports", nargs="*", type=Path, metavar="FILE", help=f"{what} (default: none)")
    forms.add(report)
    power = "what power --json wrote, for the page (default: none)"
    report.add_argument("--power", type=Path, metavar="FILE", help=power)
    report.add_argument("--schema", action="store_true", help="print the JSON Schema of a report, and do nothing else")


def _report(options: argparse.Namespace) -> int:
    if options.schema:
        print(resources.files("fsdpcheck.report").joinpath("schema.json").read_text(encoding="utf-8"), end="")
        return HOLDS
    if not options.reports:
        raise UsageError("a report is missing; next: fsdpcheck report report.json, of fsdpcheck run --json report.json")
    forms.require(options)
    sessions = sorted((document_reader.read(path) for path in options.reports), key=lambda session: session.moment)
    power = document_reader.power(options.power) if options.power is not None else {}
    forms.tell(options, sessions, power)
    return HOLDS
