"""``fsdpcheck power``: how small an error the laws find, and how often they cry wolf."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from fsdpcheck.case.profiles import WORLD_SIZES
from fsdpcheck.cli import values
from fsdpcheck.errors import FINDING, HOLDS, UsageError, spelling
from fsdpcheck.report import colour

_EPILOG = """examples:
  fsdpcheck power                                      the reference, every family of cases
  fsdpcheck power --adapter fully_shard --cases 200    errors that can be planted under any adapter
exit codes: 0 no false alarm   1 a law accused an honest run   2 usage or adapter error
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "power",
        help="plant errors of known size and show which are found",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_power)
    several = partial(parser.add_argument, action="append", default=[])
    several("--adapter", metavar="NAME", help="an implementation believed to be right, repeatable (default: reference)")
    several("--family", metavar="NAME", help="plain, clipped, probe, ..., repeatable (default: all)")
    parser.add_argument("--cases", type=values.count, default=50, metavar="N", help="cases a family (default: 50)")
    parser.add_argument(
        "--world-size",
        type=values.world_sizes,
        default=WORLD_SIZES["quick"],
        metavar="1-5",
        help="3, 1-5 or 2,4 (default: 1-5)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too (default: none)")


def _power(options: argparse.Namespace) -> int:
    import torch

    from fsdpcheck.engines.simulated import SimulatedEngine
    from fsdpcheck.judging.run import Run
    from fsdpcheck.report import power
    from fsdpcheck.studies.power.measure import FAMILIES, Family, measure

    torch.set_num_threads(1)
    chosen = [family for family in FAMILIES if not options.family or family.name in options.family]
    if unknown := set(options.family) - {family.name for family in FAMILIES}:
        known = [family.name for family in FAMILIES]
        hint = spelling.hint(min(unknown), known)
        raise UsageError(f"--family {', '.join(sorted(unknown))}: there is none such;{hint} known: {', '.join(known)}")
    engine, paint, figures, alarms = SimulatedEngine(), colour.painter(sys.stdout), {}, 0

    def report(family: Family, number: int) -> None:
        if number % 10 == 0:
            print(f"{family.name}: case {number + 1} of {options.cases}", file=sys.stderr, flush=True)

    try:
        for name in options.adapter or ["reference"]:
            tallies = measure(Run(engine, name), options.cases, options.world_size, chosen, report)
            print(f"adapter {name}\n\n{power.text(tallies, paint)}\n", flush=True)
            figures[name] = power.data(tallies)
            alarms += sum(tally.alarms for tally in tallies if tally.judge == "all laws of the tier")
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    finally:
        engine.close()
    return FINDING if alarms else HOLDS
