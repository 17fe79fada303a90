"""``fsdpcheck simulate``: a script on simulated ranks, as torchrun would start it, in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpcheck.cli import values
from fsdpcheck.cli.in_child import in_child, write
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.report import colour

if TYPE_CHECKING:
    from fsdpcheck.simulation.decisions import Decisions
    from fsdpcheck.simulation.programs.torchrun_line import Launch
    from fsdpcheck.simulation.search import Search
    from fsdpcheck.simulation.simulate import Simulation

_EPILOG = """examples:
  fsdpcheck simulate train.py -n 4 --epochs 1          what torchrun --nproc-per-node 4 train.py --epochs 1 runs
  fsdpcheck simulate -n 4 -m my_package.train          a module
  fsdpcheck simulate -n 8 --per-node 4 train.py        LOCAL_RANK and the others as on two nodes
  fsdpcheck simulate -n 8 --shrink train.py            the smallest number of ranks at which it fails alike
  fsdpcheck simulate -n 4 --schedules 50 train.py      who is received first from any source, a store's keys, ...
  fsdpcheck simulate --torchrun 'torchrun --nproc-per-node 4 train.py --epochs 1'
  fsdpcheck simulate -n 4 --trace trace.json train.py  who waited for whom, to be opened in https://ui.perfetto.dev
Options of fsdpcheck stand before the script or right after it; from the first other word on, all is the script's.

exit codes:
  0 every rank came to its end   1 a hang, a mismatch, a rank that raised or left with a code, ...
  2 usage, or something that simulated ranks do not offer   3 internal error   4 no progress   130 interrupted
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "simulate",
        help="run any torch.distributed script on simulated ranks",
        usage="fsdpcheck simulate [options] SCRIPT|-m MODULE [options] [arguments of the script]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _options(parser)
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a file, and its arguments (default: those of --torchrun)",
    )
    parser.set_defaults(command=_simulate)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=_count, metavar="N", help="number of ranks (default: that of --torchrun)")
    module = "run a module, as python -m does (default: none)"
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help=module)
    parser.add_argument("--per-node", type=_count, metavar="N", help="ranks of one node (default: all)")
    parser.add_argument(
        "--torchrun", metavar="LINE", help="ranks, script and arguments of such a command (default: none)"
    )
    parser.add_argument(
        "--schedule", choices=("forward", "reversed"), default="forward", help="who runs first (default: forward)"
    )
    parser.add_argument(
        "--budget", type=values.seconds, metavar="SECONDS", help="give up on ranks that compute longer (default: never)"
    )
    parser.add_argument(
        "--schedules", type=_count, default=1, metavar="N", help="run it under N orders of ranks, drawn (default: 1)"
    )
    parser.add_argument("--order", metavar="TOKEN", help="the order of a failure that was printed (default: the first)")
    shrink = "of a failure, look for the smallest number of ranks that fails alike (default: no)"
    parser.add_argument("--shrink", action="store_true", help=shrink)
    own = "installed packages that each rank imports for itself, as it does your own modules (default: hydra)"
    parser.add_argument("--own", metavar="PACKAGE,...", default="", help=own)
    played = "play GPUs on the CPU, and say what was played (default: there is none)"
    parser.add_argument("--cuda-as-cpu", action="store_true", help=played)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it as JSON (default: none)")
    trace = "write all calls as Chrome trace events, for Perfetto (default: none)"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    dumps = "write a Flight-Recorder dump of each rank into a new or empty folder (default: none)"
    parser.add_argument("--dumps", type=Path, metavar="DIR", help=dumps)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of ranks above 0")
    return int(text)


def _simulate(options: argparse.Namespace) -> int:
    _take_options_after_the_script(options)
    _require_places(options)
    return in_child(lambda: _run(options), options.json)


def _require_places(options: argparse.Namespace) -> None:
    """Raises UsageError for a file that could not be written, before the ranks run."""
    for name in ("json", "trace", "dumps"):
        place = getattr(options, name)
        if place is not None and not place.absolute().parent.is_dir():
            raise UsageError(explain(f"--{name} names a place in a folder that is not there", got=place))
    dumps = options.dumps
    if dumps is not None and dumps.exists() and (not dumps.is_dir() or any(dumps.iterdir())):
        then = "name another, so that dumps of two runs are not taken for one"
        raise UsageError(explain("--dumps wants a new or empty folder", got=dumps, then=then))


def _take_options_after_the_script(options: argparse.Namespace) -> None:
    """Read those of ours that stand right after the script, and leave the script and its own words."""
    if options.torchrun:
        return
    named = options.module or options.words
    script, rest = named[:1], named[1:]
    if script == ["--"]:
        script, rest = rest[:1], rest[1:]
    ours = argparse.ArgumentParser(prog="fsdpcheck simulate", add_help=False, allow_abbrev=False)
    _options(ours)
    words = {name: 1 + (action.nargs != 0) for action in ours._actions for name in action.option_strings}
    taken: list[str] = []
    while rest and rest[0].partition("=")[0] in words:
        many = 1 if "=" in rest[0] else words[rest[0]]
        taken, rest = taken + rest[:many], rest[many:]
    ours.parse_args(taken, namespace=options)
    named[:] = script + (rest[1:] if rest[:1] == ["--"] else rest)


def _run(options: argparse.Namespace) -> int:
    from fsdpcheck.report import simulation as report
    from fsdpcheck.simulation.programs.streams import descriptors_kept

    launch = _launch(options)
    with descriptors_kept():
        found = _found(options, launch)
    print(report.ending(found, colour.painter(sys.stdout)), flush=True)
    if options.json is not None:
        write(options.json, report.document(found, launch.script.argv))
    if options.trace is not None or options.dumps is not None:
        _write_traces(found.simulation, options.trace, options.dumps)
    return report.exit_code(found.simulation)


def _found(options: argparse.Namespace, launch: Launch) -> Search:
    """What came of the script under one order of its ranks, or under several."""
    from fsdpcheck.simulation.decisions import decoded
    from fsdpcheck.simulation.search import Search, some_orders
    from fsdpcheck.simulation.simulate import Options, simulate_script
    from fsdpcheck.simulation.smaller_worlds import shrunk

    wanted = Options(
        options.schedule,
        launch.per_node,
        budget=options.budget,
        cuda_as_cpu=options.cuda_as_cpu,
        own=_names(options.own),
    )
    runs = itertools.count()

    if options.order is not None and options.schedules > 1:
        raise UsageError("--order is one order of ranks and --schedules asks for several; next: leave one out")
    order = decoded(options.order) if options.order is not None else ()

    def tried(ranks: int, schedules: int) -> Search:
        def once(decisions: Decisions | None) -> Simulation:
            shown = replace(wanted, decisions=decisions, show=next(runs) == 0)
            return simulate_script(launch.script, ranks, shown)

        if options.order is not None:
            return _in_order(once, order)
        if options.schedules > 1:
            return some_orders(once, schedules)
        return Search(once(None), 1, False)

    found = tried(launch.ranks, options.schedules)
    return shrunk(found, tried, launch.per_node) if options.shrink else found


def _in_order(once: Callable[[Decisions], Simulation], order: tuple[str, ...]) -> Search:
    """The program in an order that was printed once. Raises UsageError if it ends well without those decisions."""
    from fsdpcheck.simulation.decisions import Decisions
    from fsdpcheck.simulation.search import Search

    decisions = Decisions(order)
    done = once(decisions)
    if decisions.left and done.failure is None:
        raise UsageError(
            explain(
                "the program no longer comes to a decision of this order, and ends well",
                got=f"no {decisions.left[0]!r}",
                wanted=f"the decisions of the token: {', '.join(map(repr, order))}",
                then="look for orders anew, by --schedules",
            )
        )
    left = tuple(f"a decision of the order did not come up: {key}" for key in decisions.left)
    return Search(replace(done, notes=(*done.notes, *left)), 1, False, order)


def _write_traces(done: Simulation, trace: Path | None, dumps: Path | None) -> None:
    from fsdpcheck.traces import chrome, flight_recorder
    from fsdpcheck.traces.job import of_simulation

    job = of_simulation(done)
    if trace is not None:
        write(trace, chrome.document(job))
    if dumps is not None:
        dumps.mkdir(exist_ok=True)
        flight_recorder.write(job, dumps)


def _launch(options: argparse.Namespace) -> Launch:
    from fsdpcheck.simulation.programs import script, torchrun_line
    from fsdpcheck.simulation.programs.torchrun_line import Launch

    if options.torchrun:
        if options.words or options.module:
            raise UsageError("--torchrun names the script already; next: leave one of the two out")
        return torchrun_line.read(options.torchrun, options.ranks, options.per_node or 0)
    if options.ranks is None:
        raise UsageError("how many ranks? next: add -n 4, or paste a command line by --torchrun")
    if options.module:
        name, *arguments = options.module
        return Launch(script.of_module(name, arguments), options.ranks, options.per_node or 0)
    if not options.words:
        raise UsageError("a script is missing; next: fsdpcheck simulate train.py -n 4")
    file, *arguments = options.words
    return Launch(script.of_file(Path(file), arguments), options.ranks, options.per_node or 0)
