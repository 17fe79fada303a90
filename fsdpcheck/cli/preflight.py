"""``fsdpcheck preflight``, and ``torchrun -m fsdpcheck``: four questions to ask before a long job, on real ranks."""

from __future__ import annotations

import argparse
import fnmatch

from fsdpcheck.cli import sessions
from fsdpcheck.cli.exits import is_launched
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.report import preflight

_EPILOG = f"""questions:
{preflight.listed()}

examples:
  torchrun --nproc-per-node 4 -m fsdpcheck                            on torchrun's ranks, and on fewer of them
  torchrun --nproc-per-node 4 -m fsdpcheck preflight --adapter fsdp1
  torchrun --nproc-per-node 4 -m fsdpcheck --model train.py:build --batch train.py:batch --parallelize train.py:shard
  fsdpcheck preflight                                                 on gloo processes of this machine, 2 and 4
exit codes: those of run
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "preflight",
        help="before a long job: hangs, gradients, checkpoints and memory, on real ranks",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sessions.add(parser)
    parser.set_defaults(command=_preflight)


def _preflight(options: argparse.Namespace) -> int:
    globs = [glob.strip() for globs in options.law for glob in globs.split(",")] or ["*"]
    asked = [law for law in preflight.laws(options.real) if any(fnmatch.fnmatchcase(law, glob) for glob in globs)]
    if not asked:
        known = ", ".join(preflight.laws(options.real))
        what, then = "no question of a preflight is about these laws", "leave --law out, or see `fsdpcheck run`"
        raise UsageError(explain(what, got=", ".join(globs), wanted=f"some of {known}", then=then))
    options.law = [",".join(asked)]
    if not options.adapter and not options.parallelize:
        options.adapter = list(preflight.ADAPTERS)
    if not is_launched():
        options.engine = "processes"
        options.world_size = options.world_size or (2, 4)
    return sessions.told(options, ending=preflight.ending).exit_code
