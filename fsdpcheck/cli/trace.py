"""``fsdpcheck trace``: files of traces, of simulated ranks and of real jobs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpcheck.errors import HOLDS, UsageError, explain
from fsdpcheck.report import colour

if TYPE_CHECKING:
    from fsdpcheck.traces.job import Job

_MANY = 50
"""Files that take some seconds to read."""

_EPILOG = """examples:
  fsdpcheck trace check dumps/                    a folder with a Flight-Recorder dump of each rank, NCCL's or gloo's
  fsdpcheck trace check dumps/step7_*             only these
  fsdpcheck trace check trace.json                what fsdpcheck simulate --trace trace.json, or --json, wrote
Found are calls that differ between the members of a group, members that never came, ranks that wait for one another,
and orders across groups that are a ring. Dumps may be pickles or JSON; nothing in them is run.

exit codes:
  0 nothing wrong   1 a finding   2 usage, or a file that cannot be read   3 internal error
  4 undecided: ranks stood in a call with a rank of which there is no dump
"""


_SHOW_EPILOG = """example:
  fsdpcheck simulate -n 2 --trace trace.json train.py; fsdpcheck trace show trace.json
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    trace = commands.add_parser("trace", help="traces in files: Flight-Recorder dumps, and what simulate wrote")
    of_trace = trace.add_subparsers(required=True, metavar="{check,show}")
    check = of_trace.add_parser(
        "check",
        help="what is wrong with the calls of a job",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.set_defaults(command=_check)
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders or files, all of one job")
    in_order = "take each rank's device to run calls one after another, as NCCL's may (default: for NCCL's dumps)"
    check.add_argument("--in-order", action="store_true", help=in_order)
    check.add_argument("--json", type=Path, metavar="FILE", help="write what came of it as JSON (default: none)")

    show = of_trace.add_parser(
        "show",
        help="draw the calls of simulated ranks as text",
        epilog=_SHOW_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.set_defaults(command=_show)
    show.add_argument("file", type=Path, metavar="FILE", help="what fsdpcheck simulate --trace or --json wrote")
    width = "characters for the time (default: 60)"
    show.add_argument("--width", type=_width, default=60, metavar="N", help=width)


def _width(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of characters")
    return int(text)


def _show(options: argparse.Namespace) -> int:
    from fsdpcheck.report import timeline

    for line in timeline.drawn(_read([options.file]), options.width):
        print(line)
    return HOLDS


def _read(paths: Sequence[Path]) -> Job:
    from fsdpcheck.traces import reading

    for path in paths:
        if not path.exists():
            raise UsageError(explain("there is no such file or folder", got=path, then="name dumps, or their folder"))
    return reading.read(paths, _with_progress)


def _with_progress(files: Sequence[Path]) -> Iterable[Path]:
    """The files, on a terminal with a bar while there are many."""
    if len(files) < _MANY or not sys.stderr.isatty():
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, "reading", console=Console(stderr=True), transient=True)


def _check(options: argparse.Namespace) -> int:
    from fsdpcheck.report import trace as report
    from fsdpcheck.traces import checking

    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UsageError(explain("--json names a place in a folder that is not there", got=options.json))
    job = _read(options.paths)
    job = replace(job, in_order=job.in_order or options.in_order)
    checked = report.Checked(options.paths, job, checking.finding(job))
    print(report.ending(checked, colour.painter(sys.stdout)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report.document(checked), indent=1) + "\n", encoding="utf-8")
    return checked.exit_code
