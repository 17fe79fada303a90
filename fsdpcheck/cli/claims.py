"""``fsdpcheck claims``: what is said about sharded, private training, measured row by row."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdpcheck.errors import HOLDS, INTERNAL
from fsdpcheck.report import colour

_EPILOG = """examples:
  fsdpcheck claims                        every row of the ledger: claim, verdict, the numbers measured
  fsdpcheck claims A1 A5 D                two rows and a section
  fsdpcheck claims --markdown claims.md   the table as a document
exit codes: 0 every row has a verdict   2 usage error   3 a check raised
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "claims",
        help="measure what is claimed about sharded, private training",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_claims)
    parser.add_argument("ids", nargs="*", metavar="ID", help="A1, or a section's letter (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON too (default: none)")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table as a Markdown document too (default: none)"
    )


def _claims(options: argparse.Namespace) -> int:
    import torch

    from fsdpcheck.report import claims as report
    from fsdpcheck.studies.claims import evaluation, registry

    torch.set_num_threads(1)
    wanted = registry.chosen(options.ids)
    with _progress(len(wanted)) as progress:
        rows = evaluation.judge(wanted, lambda claim: progress(claim.id))
    print(report.text(rows, colour.painter(sys.stdout)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report.data(rows), indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(report.markdown(rows), encoding="utf-8")
    for row in rows:
        if row.trace:
            print(f"\nclaim {row.id}\n{row.trace}", file=sys.stderr)
    return INTERNAL if any(row.verdict == evaluation.ERROR for row in rows) else HOLDS


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, a plain line a row otherwise, on stderr."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda id: print(f"claim {id}", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    done: list[str] = []
    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")), highlight=False, markup=False)
    with console.status("starting") as status:

        def report(id: str) -> None:
            done.append(id)
            status.update(f"{len(done)}/{total} claim {id}")

        yield report
