"""`fsdpcheck replay`: the case of a finding, again."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fsdpcheck.cli import own_parts, sessions, values
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.errors.excerpt import shown
from fsdpcheck.report import colour, finding
from fsdpcheck.session.supervisor import replayed

EPILOG = """examples:
  fsdpcheck replay 'v2:AAAA...'                        the case of a finding, on simulated ranks
  fsdpcheck replay 'v2:AAAA...' --engine processes     the same on real gloo processes
  fsdpcheck replay report.json                         every finding of a report, a journal or a log
A token only names things; what is not part of fsdpcheck is imported only if you repeat it: --adapter,
--install, --model, --batch, --loss, --optimizer.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    replay = commands.add_parser(
        "replay",
        help="run the case of a finding again",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.set_defaults(command=replay_command)
    replay.add_argument("what", metavar="TOKEN|FILE", help="a token (v2:...) or a file that holds tokens")
    engine = "how ranks are had (default: as the token says)"
    values.one_of(replay, "--engine", ("simulated", "processes"), engine)
    sessions.add_metal(replay)
    replay.add_argument("--adapter", metavar="NAME", help="run this implementation (default: the token's)")
    replay.add_argument(
        "--install", action="append", default=[], metavar="NAME", help="allow or add an install (default: none)"
    )
    replay.add_argument(
        "--budget", type=values.seconds, metavar="SECONDS", help="give up on a run after so long (default: never)"
    )
    script = "write a program of torch alone that shows it, for torchrun on gloo (default: none)"
    replay.add_argument("--script", type=Path, metavar="FILE", help=script)
    sessions.add_laws(replay)
    own_parts.add_model(replay)


def replay_command(options: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from fsdpcheck.findings import faults, verdict
    from fsdpcheck.findings import tokens as replay

    texts = [options.what] if replay.looks_like_token(options.what) else replay.tokens_in(Path(options.what))
    tokens = [replay.decode(text) for text in texts]
    installs = [faults.resolved(name) for name in options.install]
    own = (options.model, options.batch, options.loss, options.optimizer)
    tokens = [replay.trusted(token, options.adapter, installs, own) for token in tokens]
    if options.script is not None and len(tokens) > 1:
        then = "name the token whose finding you want to send on"
        got = f"{len(tokens)} tokens in {options.what}"
        raise UsageError(explain("--script writes one program", got=got, wanted="one token", then=then))
    paint, codes = colour.painter(sys.stdout), []
    for token in tokens:
        engine = _kind(options, token.engine)
        found = shown(replayed(replay.encode(token), engine, options.budget, tuple(options.laws)))
        codes.append(found.exit_code)
        if found.finding is not None:
            broken = found.finding
            if not metal.is_simulated(engine):
                there = f"{metal.of(engine).words} x{token.case.world_size}"
                broken = replace(broken, confirmed="yes", confirmed_on=(there,))
            print(finding.render([broken], len(codes), paint, token.installs))
            if options.script is not None:
                from fsdpcheck.report import reproducer  # imports torch

                written = reproducer.program(token, broken.guarantee, options.script)
                options.script.write_text(written, encoding="utf-8")
                print(f"script: torchrun --nproc-per-node {token.case.world_size} {options.script}")
        elif found.status == "holds":
            print(f"{paint('holds', 'green')}: {found.law} on {found.adapter}, for the case\n{token.case.describe()}")
        else:
            print(finding.trouble(found))
        for what in found.left:
            print(f"  {what}; it was put back (docs/threat-model.md)")
    return verdict.exit_code(codes)


def _kind(options: argparse.Namespace, known: str) -> str:
    """The kind of ranks that is asked for; what is not said of it is as in ``known``, a token's."""
    again = metal.that_replays(known)
    if options.engine is None and options.device == "cpu" and options.backend is None:
        return again
    engine = options.engine or ("processes" if options.backend else metal.KINDS[again].engine)
    return metal.kind_of(engine, options.device, options.backend)
