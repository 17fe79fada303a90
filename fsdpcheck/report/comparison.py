"""What came of comparing a script on W ranks with itself on one: for people, and as JSON."""

from __future__ import annotations

import linecache
import shlex
from collections.abc import Iterator
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.results import Comparison, World
from fsdpcheck.comparison.smaller import Smaller
from fsdpcheck.errors import FINDING, HOLDS, NO_PROGRESS
from fsdpcheck.execution import Failure
from fsdpcheck.report.colour import Paint
from fsdpcheck.report.simulation import failed

SCHEMA: Final = 1
"""Version of the document; it grows with every change that a reader could notice."""
_NOTES: Final = 8
_NAMES: Final = 6
_FACTS: Final = {"replicas": "copies"}


def exit_code(found: Comparison) -> int:
    """0 agrees; 1 differs, or fails on more ranks; 4 nothing could be decided."""
    return {"agrees": HOLDS, "differs": FINDING, "fails": FINDING, "undecidable": NO_PROGRESS}[found.says]


def ending(found: Comparison, paint: Paint) -> str:
    """The report: a paragraph for each number of ranks, then what was not judged."""
    parts = list(_not_compared(found, paint)) if found.why else []
    for world in found.worlds:
        parts += _world(world, found, paint)
    parts += _notes(found)
    return "\n".join(parts)


def _not_compared(found: Comparison, paint: Paint) -> Iterator[str]:
    yield paint(f"nothing compared: {found.why}", "yellow")
    if found.failure is not None:
        yield failed(found.failure, paint)
    if "deterministic" in found.why:
        yield "  next    seed torch, random and numpy on every rank, or have it done: --seed 0; read no clock,"
        yield "          and no memory that nobody has written, of torch.empty or Module.to_empty"
    elif "no optimizer" in found.why:
        yield "  wanted  a step of a torch.optim.Optimizer; what a script does to parameters by itself is not seen"
        yield "  next    have it train for a step or more: look at its arguments, and at how many rows a rank is given;"
        yield "          where it needs several ranks, compare with the fewest that it runs on: --ranks 2,4 say"
    elif found.failure is not None and found.base == 1 and found.failure.kind == "raised":
        yield "  next    mend it, or, where one rank cannot run it, compare with the fewest that can: --ranks 2,4 say"


def _world(world: World, found: Comparison, paint: Paint) -> Iterator[str]:
    yield from _verdict(world, found, paint)
    if world.warning:
        yield paint(f"  warning {world.warning}:", "yellow")
        yield "          its running averages stand in their place here, and what is said is said of that"


def _verdict(world: World, found: Comparison, paint: Paint) -> Iterator[str]:
    base = _ranks(found.base)
    if world.says == "agrees":
        fine = "equal bits" if world.equal == world.observables else f"resolution {world.resolution:.1e}"
        where = " but for the statistics of BatchNorm" if world.warning else ""
        head = f"{_ranks(world.size)} agree with {base}{where}: {found.steps} steps, {world.observables} observables"
        yield paint(f"{head}, {fine}", "yellow" if world.warning else "green")
        yield from _exact(world)
        yield from _precision(world, paint)
        return
    if world.says == "fails":
        assert world.failure is not None
        yield paint(f"{_ranks(world.size)} fail where {base} {_do(found.base, 'come')} to the end", "red")
        yield failed(world.failure, paint)
        return
    if world.says == "undecidable":
        yield from _undecidable(world, paint)
        return
    yield paint(f"{_ranks(world.size)} differ from {base}{', the base' * (found.base > 1)}", "red")
    if world.fact is not None:
        yield f"  {_FACTS.get(world.fact.kind, world.fact.kind):<8}{world.fact.text}"
    if world.first is not None:
        yield from _first(world.first, world)
    yield from _exact(world)
    yield from (f"  cause   {cause.text}" for cause in world.causes)
    yield from _places(world)


def _first(first: Decision, world: World) -> Iterator[str]:
    yield f"  first   {first.key}: {_apart(first)}"
    if world.of_alike > 1:
        names = ", ".join(world.alike[:_NAMES]) + (", ..." if len(world.alike) > _NAMES else "")
        yield f"  alike   {len(world.alike)} of {world.of_alike} {first.key.kind}s of this step differ: {names}"
    yield f"  in all  {world.differing} of {world.observables} observables differ, {world.equal} have equal bits"


def _apart(decision: Decision) -> str:
    if decision.why == "exact":
        return f"apart by {decision.apart:.2g}, largest entry {decision.size:.4g}: it is exact, so every bit counts"
    relative = decision.apart / decision.size if decision.size else decision.apart
    seen = f"{relative:.2g} of its largest entry {decision.size:.4g}"
    return f"apart by {seen}, where rounding explains {decision.resolution:.1e}"


def _exact(world: World) -> Iterator[str]:
    if world.exact:
        yield f"  exact   {world.exact} of {world.observables} observables are proved exact: every bit counts"
    elif world.ended:
        yield f"  exact   none of {world.observables} observables is proved so"
    if world.ended:
        yield f"  ended   by {world.ended}"


def _places(world: World) -> Iterator[str]:
    if world.line:
        yield f"  seen at {world.line}{_source(world.line)}"
    if world.call:
        yield f"  after   {world.call}"


def _source(line: str) -> str:
    """The text of a line that stands as file:number."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f": {text}" if text else ""


def _undecidable(world: World, paint: Paint) -> Iterator[str]:
    yield paint(f"{_ranks(world.size)}: undecidable", "yellow")
    if world.undecidable:
        first = world.undecidable[0]
        yield f"  from    {first.key} on: noise of rounding moves it by {_of(first.noise, first.size)} of its size"
        yield f"  {len(world.undecidable)} of {world.observables} observables; the others agree"
    yield from (f"  cause   {cause.text}" for cause in world.causes)
    if world.undecidable and world.causes:
        yield "  next    give it data in which nothing is tied, or have it break ties by a rule of its own"


def _of(part: float, whole: float) -> str:
    return f"{part / whole:.1e}" if whole else f"{part:.1e}"


def _precision(world: World, paint: Paint) -> Iterator[str]:
    if world.precision is None:
        return
    first = world.precision
    if first.why == "lower precision":
        yield paint("  warning precision only: something is computed in a lower precision than on the base", "yellow")
        times = f"{first.apart / first.noise:.1e} times as far"
        yield f"  first   {first.key}: noise of rounding moves it {times} in the script's own precision"
    else:
        told = "  warning precision only: in float64 they agree, in the script's own precision they do not"
        yield paint(told, "yellow")
        yield f"  first   {first.key}: {_apart(first)}"


def _notes(found: Comparison) -> Iterator[str]:
    for note, many in found.notes[:_NOTES]:
        yield f"  note    {note}" + (f" ({many} times)" if many > 1 else "")
    if len(found.notes) > _NOTES:
        yield f"  note    and {len(found.notes) - _NOTES} more, which --json has"
    if not found.why:
        alarm = f"an honest script is said to differ with a probability of {found.false_alarm:.0e} at most"
        yield f"  {found.runs} runs; {alarm}"


def smaller(found: Comparison, less: Smaller, paint: Paint) -> str:
    """The difference with the smallest numbers of those that the user has marked."""
    command = (
        f"fsdpcheck compare {shlex.quote(found.line.with_numbers(less.marked))} --ranks {found.base},{less.world.size}"
    )
    return "\n".join(
        [paint(f"smaller: it differs alike with {_numbers(less)}, {less.tried} tried", "bold"), f"  {command}"]
    )


def _numbers(less: Smaller) -> str:
    return ", ".join(f"{name} = {value}" for name, value in less.marked.items())


def _ranks(size: int) -> str:
    return "one rank" if size == 1 else f"{size} ranks"


def _do(size: int, verb: str) -> str:
    return f"{verb}s" if size == 1 else verb


def document(found: Comparison, less: Smaller | None = None) -> dict[str, Any]:
    """The same as JSON data.

    {schema, fsdpcheck, command, base, says, why, exit_code, steps, runs, false_alarm, failure, worlds, smaller, notes}.
    A world is {ranks, says, failure, fact, first, precision, named, causes, undecidable, observables, equal, differing,
    alike, of_alike, resolution, line, call, exact, exact_up_to, warning}; a fact {step, kind, text}; a decision
    {observable, step, kind, name, apart, threshold, size}; ``smaller`` None or {numbers, world}.
    """
    return {
        "schema": SCHEMA,
        "fsdpcheck": __version__,
        "command": found.line.text,
        "base": found.base,
        "says": found.says,
        "why": found.why,
        "exit_code": exit_code(found),
        "steps": found.steps,
        "runs": found.runs,
        "false_alarm": found.false_alarm,
        "failure": _failure(found.failure),
        "worlds": [_world_data(world) for world in found.worlds],
        "smaller": None if less is None else {"numbers": dict(less.marked), "world": _world_data(less.world)},
        "notes": [{"text": note, "times": many} for note, many in found.notes],
    }


def _world_data(world: World) -> dict[str, Any]:
    fact = world.fact
    return {
        "ranks": world.size,
        "says": world.says,
        "failure": _failure(world.failure),
        "fact": None if fact is None else {"step": fact.step, "kind": fact.kind, "text": fact.text},
        "first": _decision(world.first),
        "precision": _decision(world.precision),
        "named": category(world),
        "causes": [cause.text for cause in world.causes],
        "undecidable": [_decision(decision) for decision in world.undecidable],
        "observables": world.observables,
        "equal": world.equal,
        "differing": world.differing,
        "alike": list(world.alike),
        "of_alike": world.of_alike,
        "resolution": world.resolution,
        "line": world.line,
        "call": world.call,
        "exact": world.exact,
        "exact_up_to": world.ended,
        "warning": world.warning,
    }


def category(world: World) -> str:
    """What differs in one word of a fixed list, for tables: a fact's kind, or the cause, or the kind of observable."""
    if world.failure is not None:
        return world.failure.kind
    named = next((cause.word for cause in world.causes if cause.word), "")
    if world.precision is not None:
        return "precision only"
    if world.fact is not None:
        known = {"replicas": named or "replicas differ", "pairs": "labels"}
        return known.get(world.fact.kind, world.fact.kind)
    if named or world.first is None:
        return named
    return {"norm": "clip norm"}.get(world.first.key.kind, world.first.key.kind.partition(" ")[0])


def _failure(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"kind": failure.kind, "text": failure.text}


def _decision(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    step, kind, name = decision.key
    apart = decision.apart if decision.apart != float("inf") else None
    said = {"observable": str(decision.key), "step": step, "kind": kind, "name": name, "apart": apart}
    return {**said, "threshold": decision.threshold, "size": decision.size}
