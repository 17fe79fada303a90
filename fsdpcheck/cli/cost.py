"""``fsdpcheck cost``: what a script's collectives cost on any number of ranks, of which one runs."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fsdpcheck.cli import values
from fsdpcheck.cli.in_child import in_child, write
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.report import colour

if TYPE_CHECKING:
    from fsdpcheck.report.cost import World
    from fsdpcheck.simulation.programs.script import Script
    from fsdpcheck.traces.cost import Link

_MOST: Final = 65536
_TIME: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SIZE: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_EPILOG = """examples:
  fsdpcheck cost train.py --epochs 1                             calls, bytes and time on 8, 64, 512 and 4096 ranks
  fsdpcheck cost --ranks 16,1024 --per-node 8 train.py           on these, eight a node
  fsdpcheck cost --without-values --ranks 4096 train.py          a model that no memory here would hold
  fsdpcheck cost --between 10us,50GB/s --json cost.json train.py another network; all numbers as JSON
Rank 0 runs alone: each call of its groups ends at once, as if the other ranks did what it does. Options of fsdpcheck
stand before the script; what follows it is the script's.

exit codes:
  0 counted   1 the script failed   2 usage, or it wants more of other ranks than calls of groups   3 internal error
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "cost",
        help="calls, bytes and modelled time of a script on up to thousands of ranks",
        usage="fsdpcheck cost [options] SCRIPT [arguments of the script]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=_numbers, default=(8, 64, 512, 4096), metavar="N,...",
        help="numbers of ranks (default: 8,64,512,4096)",
    )  # fmt: skip
    parser.add_argument("--per-node", type=_number, default=8, metavar="N", help="ranks of one node (default: 8)")
    parser.add_argument(
        "--within", type=_link, default="5us,300GB/s", metavar="LATENCY,BANDWIDTH",
        help="of messages within a node, a rank and direction (default: 5us,300GB/s)",
    )  # fmt: skip
    parser.add_argument(
        "--between", type=_link, default="20us,25GB/s", metavar="LATENCY,BANDWIDTH",
        help="of messages between nodes (default: 20us,25GB/s)",
    )  # fmt: skip
    values.one_of(parser, "--rounds", ("ring", "tree"), "how latencies of a collective add up (default: ring)", "ring")
    shapes = "give tensors no values, so that a model needs no memory and no time (default: values)"
    parser.add_argument("--without-values", action="store_true", help=shapes)
    played = "play GPUs on the CPU (default: there is none)"
    parser.add_argument("--cuda-as-cpu", action="store_true", help=played)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers as JSON (default: none)")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a file, and its arguments")
    parser.set_defaults(command=_cost)


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of ranks from 1 to {_MOST}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_number(word.strip()) for word in text.split(",")))


def _link(text: str) -> tuple[float, float]:
    """(seconds, bytes a second)."""
    latency, _, bandwidth = text.partition(",")
    return _measured(latency, _TIME, text), _measured(bandwidth.removesuffix("/s"), _SIZE, text)


def _measured(text: str, units: dict[str, float], whole: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if found is None or found[2] not in units or (units is _SIZE and not float(found[1])):
        wanted = (
            f"a latency and a bandwidth above 0, such as 20us,25GB/s ({', '.join(_TIME)}; {', '.join(_SIZE)} a second)"
        )
        raise argparse.ArgumentTypeError(f"{whole!r}: wanted {wanted}")
    return float(found[1]) * units[found[2]]


def _cost(options: argparse.Namespace) -> int:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise UsageError("a script is missing; next: fsdpcheck cost train.py")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UsageError(explain("--json names a place in a folder that is not there", got=options.json))
    if options.json is not None and options.json.is_dir():
        raise UsageError(explain("--json names a folder", got=options.json, wanted="a file"))
    for ranks in options.ranks:
        if ranks > options.per_node and ranks % options.per_node:
            got = f"{ranks} ranks on nodes of {options.per_node}"
            raise UsageError(explain("ranks do not fill their nodes", got=got, then="change --ranks or --per-node"))
    return in_child(lambda: _run(options, words), options.json)


def _run(options: argparse.Namespace, words: list[str]) -> int:
    from fsdpcheck.report import cost as report
    from fsdpcheck.report import simulation
    from fsdpcheck.simulation.programs import script
    from fsdpcheck.simulation.programs.streams import descriptors_kept

    file, *arguments = words
    runnable = script.of_file(Path(file), arguments)
    worlds: list[World] = []
    paint = colour.painter(sys.stdout)
    for ranks in options.ranks:
        with descriptors_kept():
            worlds.append(_world(options, runnable, ranks, show=not worlds))
        failure = worlds[-1].done.failure
        if failure is not None:
            break
        if options.json is not None:
            write(options.json, report.document(worlds, runnable.argv))
    ended = [world for world in worlds if world.done.failure is None]
    if ended:
        print(report.text(ended, paint), flush=True)
    if failure is None:
        return 0
    print(f"rank 0 of {worlds[-1].ranks}: {simulation.failed(failure, paint)}", flush=True)
    if options.without_values:
        print("  note    tensors have no values: what asks for one may fail for that; try without the option")
    return simulation.exit_code(worlds[-1].done)


def _world(options: argparse.Namespace, runnable: Script, ranks: int, *, show: bool) -> World:
    from fsdpcheck.report.cost import World
    from fsdpcheck.simulation.simulate import Options, simulate_script
    from fsdpcheck.traces.cost import Machine

    per_node = min(options.per_node, ranks)
    wanted = Options(
        per_node=per_node,
        show=show,
        cuda_as_cpu=options.cuda_as_cpu,
        alone_of=ranks,
        without_values=options.without_values,
    )
    machine = Machine(per_node, _as_link(options.within), _as_link(options.between), options.rounds)
    return World(ranks, simulate_script(runnable, 1, wanted), machine)


def _as_link(pair: tuple[float, float]) -> Link:
    from fsdpcheck.traces.cost import Link

    return Link(*pair)
