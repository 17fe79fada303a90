"""A pair on real processes: W forked ranks on the loopback, their store in the parent, as torchrun has it.

What programs import is imported before the fork, so that time is the ranks' own.
``python -m benchmarks.communication.real [GLOB] [--faulty] [--seconds N]`` prints what came of each.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.communication.pairs import PROGRAMS, Pair, pairs, without_prefixes
from fsdpcheck.engines._real import gloo_ranks
from fsdpcheck.engines._real.forks import GRACE_SECONDS, Forked, Said, Say

_USED: Final = (
    *("_dynamo", "distributed.checkpoint", "distributed.fsdp", "distributed.pipelining"),
    "distributed.tensor.parallel",
)
"""What of torch programs import, besides what torch imports itself."""
_CHARACTERS: Final = 1200
"""How much of what one rank says is kept."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run: "completed" with what ranks returned, "raised", "ended", or "time-out", which names nothing.

    "ended": a process ended without returning or raising.
    """

    kind: str
    text: str
    seconds: float


def run(
    pair: Pair,
    faulty: bool,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    group_seconds: float | None = None,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
    grace_seconds: float = GRACE_SECONDS,
) -> Outcome:
    """Run every rank as a process of its own on gloo; one that is not at its end after ``seconds`` is ended.

    ``group_seconds``: after how long gloo's own groups and stores give up, which is half an hour without it.
    ``around``: what each rank runs its program in, by rank. ``grace_seconds``: how long the other ranks may go on when
    one has raised, before they are ended, as torchrun ends them.
    """

    def program(rank: int, say: Say) -> None:
        def within() -> object:
            with around(rank):
                return pair.run(faulty)

        tell(rank, within, say)

    _import_what_programs_use()
    started = time.monotonic()
    with gloo_ranks.on_gloo(pair.world_size, program, group_seconds, environment) as ranks:
        ranks.until_over(seconds, grace_seconds)
        return _together(ranks, pair.world_size, time.monotonic() - started)


@cache
def _import_what_programs_use() -> None:
    """Once, in the process that forks the ranks."""
    for name in _USED:
        importlib.import_module(f"torch.{name}")


def tell(rank: int, program: Callable[[], object], say: Say) -> None:
    """Run a rank's program and say how it ended."""
    try:
        returned = program()
    except SystemExit as error:
        say(rank, Said("ended", f"SystemExit({error.code!r})", error.code not in (None, 0)))
    except BaseException as error:
        say(rank, Said("raised", told(error), fails=True))
    else:
        say(rank, Said("returned", repr(returned)))


def told(error: BaseException) -> str:
    """The last line of its traceback, cut where torch's C++ frames begin, and the lines of the program in it."""
    said = str(error).partition("\nException raised from")[0][:_CHARACTERS]
    places = [
        f"\n  at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(PROGRAMS)
    ]
    return without_prefixes("".join([f"{type(error).__name__}: {said}", *places]))


def collected(
    programs: Mapping[tuple[int, ...], Callable[[Say], None]], seconds: float, grace_seconds: float = GRACE_SECONDS
) -> Outcome:
    """Fork a process for the ranks of each program, and say what came of all together."""
    _import_what_programs_use()
    started = time.monotonic()
    with Forked(programs) as ranks:
        ranks.until_over(seconds, grace_seconds)
        return _together(ranks, sum(map(len, programs)), time.monotonic() - started)


def _words(ranks: Forked, rank: int) -> tuple[str, str]:
    """What became of a rank; of a process that did not end well also the last that it wrote."""
    said = ranks.said[rank]
    if said.kind != "gone":
        return said.kind, said.what
    code = said.what
    last = ranks.output(rank).strip()[-_CHARACTERS:] if code else ""
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "ended", without_prefixes(f"{end}\n{last}".strip())


def _together(ranks: Forked, world_size: int, seconds: float) -> Outcome:
    told = ranks.said
    said = {rank: _words(ranks, rank) for rank in sorted(told)}
    kinds = {kind for kind, _ in said.values()}
    lines = [f"rank {rank}: {kind}: {text}" for rank, (kind, text) in said.items() if kind != "returned"]
    seconds = round(seconds, 2)
    if any(one.fails for one in told.values()):
        return Outcome("raised" if "raised" in kinds else "ended", "\n".join(lines), seconds)
    if len(said) < world_size:
        silent = sorted(set(range(world_size)) - set(said))
        return Outcome("time-out", "\n".join([*lines, f"ranks {silent} not at their end"]), seconds)
    if "ended" in kinds:
        return Outcome("ended", "\n".join(lines), seconds)
    return Outcome("completed", "; ".join(text for _, text in said.values()), seconds)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("glob", nargs="?", default="*")
    parser.add_argument("--faulty", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    for pair in pairs():
        if fnmatch(pair.name, asked.glob) or fnmatch(pair.class_, asked.glob):
            outcome = run(pair, asked.faulty, asked.seconds)
            print(f"{pair.class_}: {pair.name}: {outcome.kind} ({outcome.seconds} s) {outcome.text}", flush=True)


if __name__ == "__main__":
    main()
