"""`fsdpcheck run`: laws on implementations."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from fsdpcheck.cli import blocks, coverage, demands, gate, sessions, settings
from fsdpcheck.cli.exits import say
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.findings.verdict import exit_code
from fsdpcheck.report import colour

EPILOG = """examples:
  fsdpcheck run                                        the built-in implementations, quick profile
  fsdpcheck run --adapter reference --law 'norms.*'    one adapter, one chapter
  fsdpcheck run --adapter train.py:MyAdapter           your own (see README.md: an adapter is one file)
  fsdpcheck run --world-size 2,4 --profile ci --json report.json
  fsdpcheck run --adapter fully_shard --avoid tied     no case with a trait; `fsdpcheck list traits` names all
  fsdpcheck run --adapter opacus:sound                 a gate on Opacus, around its known defects
  fsdpcheck run --model train.py:build --batch train.py:batch      the laws on your own model
  fsdpcheck run --model train.py:build --batch train.py:batch --parallelize train.py:shard    and your own sharding
  torchrun --nproc-per-node 4 -m fsdpcheck run         real ranks, world size 4; torchrun itself exits with 1
                                                       whenever a rank's exit code is not 0
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    run = commands.add_parser(
        "run",
        help="check laws on implementations",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(command=_run)
    sessions.add(run)
    blocks.add(run)
    demands.add(run)
    run.add_argument(
        "--resume", action="store_true", help="check only what FILE, of an interrupted session, does not hold yet"
    )
    measured = "measure which lines and branches run, into a file of coverage.py, by law (default: none)"
    run.add_argument("--coverage", type=Path, metavar="FILE", help=measured)


def _run(options: argparse.Namespace) -> int:
    if options.resume and not options.json:
        raise UsageError("--resume goes on with the session of a file; next: name it with --json")
    if options.shard != (1, 1) and (options.require or options.baseline is not None):
        what = "a shard is held to nothing: it judges a part"
        then = "say --require and --baseline to `fsdpcheck merge`, which has all of it"
        raise UsageError(explain(what, then=then))
    demands.require_known(options)
    held_to = partial(demands.hold, options, demands.read(options))
    if options.coverage is not None:
        with coverage.measured(options) as folder:
            ledger = sessions.told(options, folder=folder, held_to=held_to)
            print(coverage.reached(folder, options.coverage, colour.painter(sys.stdout)), flush=True)
        return ledger.exit_code
    if not (options.adapter or options.parallelize or options.model) and settings.are_in(gate.SETTINGS):
        what = f"[{settings.TABLE}] of {gate.SETTINGS} is read by `fsdpcheck gate`; this run judges"
        say(f"fsdpcheck: {what} {', '.join(sessions.plan_of(options).adapters)}")
    codes = []
    for block in blocks.each(options):
        ledger = sessions.told(block, goes_on=block.resume, held_to=held_to)
        codes.append(ledger.exit_code)
        if ledger.interrupted:
            return ledger.exit_code
    return exit_code(codes)
