"""``fsdpcheck merge``: one report of all shards and blocks of a session."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from fsdpcheck.cli import demands
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.report import colour, document, summary
from fsdpcheck.report.merging import merged

_EPILOG: Final = """example, a session of 16 blocks on 8 machines (docs/shards.md):
  fsdpcheck run --adapter ddp --blocks 16 --shard 3/8 --json part3.json    on the third machine: part3.seed0.json, ...
  fsdpcheck merge part*.json --json night.json                             where all files are
  fsdpcheck merge part*.json --baseline fsdpcheck-baseline.json            red where a check of a gate was not judged
Reports are merged that differ in shard and seed alone and were judged with the same code. Red is a law that breaks in
any of them, a shard that is missing, and what is red in one of them.

`fsdpcheck report merge` is another way to write it.

exit codes: those of run
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    merge = commands.add_parser(
        "merge",
        help="one report of all shards of a session",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.set_defaults(command=_merge)
    merge.add_argument("reports", nargs="+", type=Path, metavar="FILE", help="what run --shard --json wrote, all of it")
    merge.add_argument("--json", type=Path, metavar="FILE", help="write the merged session as JSON (default: none)")
    demands.add(merge)


def spelled(words: list[str]) -> list[str]:
    """The words of a command line; of `fsdpcheck report merge ...` those of `fsdpcheck merge ...`, which it means."""
    return words[1:] if words[:2] == ["report", "merge"] and not Path("merge").exists() else words


def _merge(options: argparse.Namespace) -> int:
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UsageError(explain("--json names a place in a folder that is not there", got=options.json))
    reports = [path for path in options.reports if path != options.json]
    if not reports:
        raise UsageError(
            explain("there is nothing to merge", got=options.json, wanted="reports beside the one to write")
        )
    wanted = demands.read(options)
    ledger = merged(reports)
    demands.hold(options, wanted, ledger)
    print(summary.ending(ledger, colour.painter(sys.stdout)), flush=True)
    if options.json is not None:
        text = json.dumps(document.document(ledger), indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return ledger.exit_code
