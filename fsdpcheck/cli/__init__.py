"""The command line: parse, call, print. Nothing here imports torch or hypothesis before a command needs it."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from fsdpcheck import __version__
from fsdpcheck.cli import (
    claims,
    compare,
    completion,
    cost,
    doctor,
    faults,
    gate,
    init,
    launch,
    listing,
    merge,
    power,
    preflight,
    replay,
    report,
    run,
    simulate,
    trace,
)
from fsdpcheck.cli.exits import guarded, is_launched, say, serves
from fsdpcheck.errors import USAGE

_WORDLESS = """fsdpcheck: a command is missing; next:
  fsdpcheck run --adapter reference --law 'training.*'              laws on an implementation, on simulated ranks
  torchrun --nproc-per-node 4 -m fsdpcheck run --adapter reference  the same on torchrun's ranks
  torchrun --nproc-per-node 4 -m fsdpcheck                          questions before a long job, on its ranks
  fsdpcheck --help                                                  all commands"""

_EPILOG = """exit codes:
  0 every promised law holds   1 a finding   2 usage or adapter error   3 internal error   4 no progress
  130 interrupted; findings so far are printed and kept"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if is_launched():
        return launch.main(words, lambda asked: _parsed(gate.expanded(asked)))
    if not words:
        say(f"{_parser().format_usage().rstrip()}\n{_WORDLESS}")
        return USAGE

    def command() -> int:
        options = _parsed(gate.expanded(words))
        return int(options.command(options))

    return guarded(command)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options; what argparse prints by itself comes from one rank."""
    out, err = (io.StringIO(), io.StringIO()) if serves() else (sys.stdout, sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        parser = _parser()
        options, left = parser.parse_known_args(merge.spelled([*words]))
        if left:
            parser.error(f"unrecognized arguments: {' '.join(left)}{_instead(options)}")
        return options


def _instead(options: argparse.Namespace) -> str:
    """What to do about arguments that are not known, where that is known."""
    if options.command is not compare._compare:
        return ""
    return (
        f"\n  next    the script and its arguments are one word: fsdpcheck compare '{options.line} ...' --ranks 1,2,4"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdpcheck",
        description="Does a sharded, private training step compute exactly what one device would, and can it hang?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fsdpcheck {__version__}")
    commands = parser.add_subparsers(
        required=True,
        metavar="{run,preflight,doctor,init,gate,merge,replay,report,simulate,cost,compare,trace,power,faults,claims,list,completion}",
    )
    for command in (
        run,
        preflight,
        doctor,
        init,
        gate,
        merge,
        replay,
        report,
        simulate,
        cost,
        compare,
        trace,
        power,
        faults,
        claims,
    ):
        command.add(commands)
    listing.add(commands)
    completion.add(commands, _parser)
    return parser
