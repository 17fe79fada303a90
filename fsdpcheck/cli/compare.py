"""``fsdpcheck compare``: a training script on W simulated ranks against itself on one, without a tolerance."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpcheck.cli import values
from fsdpcheck.cli.exits import is_launched
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.report import colour

if TYPE_CHECKING:
    from fsdpcheck.comparison.kept_runs import Runs
    from fsdpcheck.comparison.results import Comparison

_EPILOG = """examples:
  fsdpcheck compare 'train.py --batch-size {16//W} --steps 5' --ranks 1,2,4
  fsdpcheck compare '-m my_package.train --micro-batch {8//W} --layers {layers:4}'
  fsdpcheck compare 'pipeline.py' --ranks 2,4          against 2 ranks, where one cannot run it
Braces hold arithmetic over W, the number of ranks: together the ranks must do what one does. A number with a name,
{layers:4}, may be made smaller: where ranks differ, the smallest that still differs alike is looked for.

exit codes:
  0 all agree   1 they differ, or fail on more ranks   2 usage   3 internal error
  4 nothing could be decided   130 interrupted
"""
_UNDER_TORCHRUN = (
    "fsdpcheck: compare simulates its ranks, all of them in rank 0 of torchrun; the other processes of torchrun wait."
    " Next: leave torchrun out, or --script FILE for a program that shows on real ranks what differs"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "compare",
        help="does a training script compute on W ranks what it computes on one?",
        usage="fsdpcheck compare [options] 'SCRIPT [arguments with {16//W}]'",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("line", metavar="'SCRIPT ...'", help="the script and its arguments, as one word")
    parser.add_argument(
        "--ranks",
        type=_sizes,
        default=_ranks(),
        metavar="1,2,4",
        help="numbers of ranks, the first against the others (default: 1,2,4; under torchrun 1 and its number)",
    )
    parser.add_argument("--per-node", type=int, default=0, metavar="N", help="ranks of one node (default: all)")
    played = "play GPUs on the CPU, and say what was played (default: there is none)"
    parser.add_argument("--cuda-as-cpu", action="store_true", help=played)
    own = "installed packages that each rank imports for itself (default: hydra)"
    parser.add_argument("--own", metavar="PACKAGE,...", default="", help=own)
    parser.add_argument(
        "--budget", type=values.seconds, metavar="SECONDS", help="give up on ranks that compute longer (default: never)"
    )
    parser.add_argument(
        "--false-alarm",
        type=_probability,
        metavar="P",
        help="probability with which an honest script may be said to differ (default: 1e-6)",
    )
    parser.add_argument(
        "-j", "--jobs", type=int, metavar="N", help="runs at a time (default: the cores of this machine)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it as JSON (default: none)")
    exact = "draw numbers of few bits, and judge by every bit what is proved exact (default: by noise alone)"
    parser.add_argument("--exact", action="store_true", help=exact)
    seed = "begin each process with this seed of torch, random and numpy (default: as the script does)"
    parser.add_argument("--seed", type=_seed, metavar="N", help=seed)
    script = "write a program that shows with torch alone what differs, for torchrun on gloo (default: none)"
    parser.add_argument("--script", type=Path, metavar="FILE", help=script)
    parser.set_defaults(command=_compare)


def _ranks() -> tuple[int, ...]:
    """Numbers of ranks where nobody says: ranks are simulated under torchrun too."""
    return (1, int(os.environ["WORLD_SIZE"])) if is_launched() and "WORLD_SIZE" in os.environ else (1, 2, 4)


def _sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted numbers of ranks, 1,2,4 say")
    return tuple(map(int, words))


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a whole number from 0 to 2**32 - 1, as numpy takes")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a probability between 0 and 1, 1e-6 say")
    return value


def _compare(options: argparse.Namespace) -> int:
    for name, path in (("--json", options.json), ("--script", options.script)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(explain(f"{name} names a place in a folder that is not there, or a folder", got=path))
    if is_launched():
        print(_UNDER_TORCHRUN, file=sys.stderr)
    from fsdpcheck.comparison.command_line import read
    from fsdpcheck.comparison.compare import compare
    from fsdpcheck.comparison.kept_runs import Runs
    from fsdpcheck.comparison.rounding_bound import FALSE_ALARM
    from fsdpcheck.comparison.runs import Draws
    from fsdpcheck.comparison.smaller import smaller
    from fsdpcheck.report import comparison as report
    from fsdpcheck.simulation.simulate import Options

    own = tuple(name.strip() for name in options.own.split(",") if name.strip())
    wanted = Options(
        per_node=options.per_node, budget=options.budget, show=False, cuda_as_cpu=options.cuda_as_cpu, own=own
    )
    jobs = options.jobs or _usable_cores()
    alarm = options.false_alarm or FALSE_ALARM
    line, paint, told = read(options.line), colour.painter(sys.stdout), _progress()
    draws = Draws(options.exact, options.seed)
    runs = Runs(line, wanted, options.ranks[0], jobs, told, draws)
    found = compare(line, options.ranks, wanted, jobs=jobs, false_alarm=alarm, told=told, runs=runs)
    print(report.ending(found, paint), flush=True)

    def again(ranks: int, marked: Mapping[str, int]) -> Comparison:
        fewer = read(line.with_numbers(marked))
        kept = Runs(fewer, wanted, found.base, jobs, told, draws)
        return compare(fewer, (found.base, ranks), wanted, jobs=jobs, false_alarm=alarm, told=told, runs=kept)

    less = smaller(found, again)
    if less is not None:
        print(report.smaller(found, less, paint), flush=True)
    if options.script is not None:
        if less is not None or options.exact:  # processes draw what the script draws
            marked = line.marked if less is None else less.marked
            as_in_processes = replace(draws, exact=False)
            runs = Runs(read(line.with_numbers(marked)), wanted, found.base, jobs, told, as_in_processes)
        print(
            _script(options.script, found if less is None else replace(found, worlds=(less.world,)), runs), flush=True
        )
    if options.json is not None:
        options.json.write_text(json.dumps(report.document(found, less), indent=1) + "\n", encoding="utf-8")
    return report.exit_code(found)


def _script(path: Path, found: Comparison, runs: Runs) -> str:
    """Write the program for the fewest ranks that differ; what to say of it."""
    from fsdpcheck.comparison.reproducer import NotShown, program

    wrong = [world for world in found.worlds if world.says in ("differs", "fails")]
    if not wrong:
        return f"script: nothing differs, so {path} is not written"
    world = min(wrong, key=lambda each: each.size)
    try:
        text = program(world, runs)
    except NotShown as why:
        return f"script: {path} is not written: {why}"
    path.write_text(text, encoding="utf-8")
    return f"script: torchrun --nproc-per-node {world.size} {path}"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _progress() -> Callable[[int, int, str], Any]:
    """One live line on a terminal; nothing otherwise, for a comparison is short."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return lambda ended, goal, what: None

    def told(ended: int, goal: int, what: str) -> None:
        print(f"\r\x1b[2K[{ended}/{goal}] {what}" if ended < goal else "\r\x1b[2K", end="", file=sys.stderr, flush=True)

    return told
