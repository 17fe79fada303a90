"""Compare: a script on each number of ranks against itself on the first, from observation to verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from fsdpcheck.comparison.command_line import CommandLine
from fsdpcheck.comparison.distances import between
from fsdpcheck.comparison.judge import Judge, raised
from fsdpcheck.comparison.kept_runs import Runs, Told
from fsdpcheck.comparison.record import Observation, order
from fsdpcheck.comparison.results import Comparison
from fsdpcheck.comparison.rounding_bound import FALSE_ALARM
from fsdpcheck.comparison.runs import Run
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.execution import Failure
from fsdpcheck.simulation.simulate import Options

_OTHER: Final = 1 << 20
"""Added to what stands for the system's random numbers, in a run that must come out equal all the same."""


def compare(
    line: CommandLine,
    ranks: Sequence[int],
    options: Options,
    *,
    jobs: int = 1,
    false_alarm: float = FALSE_ALARM,
    told: Told = lambda ended, goal, what: None,
    runs: Runs | None = None,
) -> Comparison:
    """Compare the script on each of ``ranks`` with itself on the first.

    Guarantee: an observable "agrees" where the two runs differ by no more than noise of rounding moves either, at a
    printed resolution no coarser than float32's; "differs" is said of an honest script with a probability of
    ``false_alarm`` at most, in the model of rounding_bound.py. Raises UsageError for ranks that are none, and for a
    command line that is none at one of them. ``runs``: where runs are kept, for a caller that looks at them.
    """
    _require(ranks)
    for size in ranks:
        line.at(size)
    runs, base = runs or Runs(line, options, ranks[0], jobs, told), ranks[0]
    clean, other = Run(base), Run(base, entropy=_OTHER)
    runs.get([clean])
    comparison = Comparison(line, base, (), false_alarm=false_alarm, steps=sum(_steps(runs.done[clean])))
    why, failure = _fails(runs, clean)
    if not why:
        runs.get([other, *(raised(size) for size in ranks), *(Run(size) for size in ranks[1:])])
        why = _moves(runs, clean, other)
    if why:
        return replace(comparison, why=why, failure=failure, runs=len(runs.done), notes=runs.notes())
    worlds = tuple(Judge(runs, size, false_alarm / (len(ranks) - 1)).world().beside(base) for size in ranks[1:])
    return replace(comparison, worlds=worlds, runs=len(runs.done), notes=(*_zero(runs, clean), *runs.notes()))


def _require(ranks: Sequence[int]) -> None:
    if len(set(ranks)) < 2 or len(set(ranks)) < len(ranks) or min(ranks) < 1:
        raise UsageError(
            explain("--ranks names the numbers of ranks to compare", got=",".join(map(str, ranks)), wanted="1,2,4 say")
        )


def _steps(observation: Observation) -> Sequence[int]:
    return next((record.steps for record in observation.ranks if record.steps), ())


def _fails(runs: Runs, clean: Run) -> tuple[str, Failure | None]:
    """Why the base is nothing to compare with, if it fails or makes no step."""
    failure = runs.done[clean].failure
    if failure is not None:
        return f"the script fails on {_ranks(clean)}", failure
    return ("", None) if any(_steps(runs.done[clean])) else (f"no optimizer made a step on {_ranks(clean)}", None)


def _moves(runs: Runs, clean: Run, other: Run) -> str:
    """The same if two runs of the base differ."""
    moved = [key for key, distance in between(runs.values(clean), runs.values(other)).items() if distance.apart]
    if not moved:
        return ""
    first = min(moved, key=order)
    return f"the script is not deterministic: run twice on {_ranks(clean)}, {first} is not the same"


def _zero(runs: Runs, clean: Run) -> Iterator[tuple[str, int]]:
    """A note where no gradient has an entry that is not zero: ranks that agree then show little."""
    gradients = [value for key, value in runs.values(clean).items() if key.kind == "gradient"]
    if gradients and not any(bool(value.any()) for value in gradients):
        yield f"every gradient is zero on {_ranks(clean)}, so that no mistake in gradients shows", 1


def _ranks(run: Run) -> str:
    return "one rank" if run.world_size == 1 else f"{run.world_size} ranks"
