"""Checks of accounts: an accountant is told what ran, and nothing that is public follows from the size of a data set.

Legend: s the noise multiplier, q the rate, W ranks, K micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program.samplers import ENGINE

Entry = tuple[float, float, int]
"""(noise multiplier, rate, steps)."""


def assert_accounted(execution: Execution) -> None:
    """On every rank and after every step an accountant has been told of all steps so far: s and q of each, once."""
    case, rate = execution.request.training, execution.request.rate
    for result in completed(execution):
        for step, record in enumerate(result.steps):
            if record.accounted is None:
                raise UsageError(f"the run recorded no accounts (rank {result.rank}); next: observe 'accounted'")
            told = [entry for entry in record.accounted if entry[2]]
            wanted = (case.step.noise_multiplier, rate, step + 1)
            if _together(told) != [wanted]:
                resumed = bool(execution.request.load_from)
                raise Violation(
                    "an accountant is told what did not run",
                    got="; ".join(map(_words, told)) or "nothing",
                    wanted=_words(wanted),
                    where=f"after step {step}, rank {result.rank}",
                    cause=partial(_of_entries, case, rate, step, told, resumed),
                )


def assert_same_public(one: Execution, other: Execution) -> None:
    """On every rank the same is public of both trainings, whose data sets differ by one record."""
    sizes = [execution.request.records for execution in (one, other)]
    for mine, theirs in zip(completed(one), completed(other), strict=True):
        a, b = (_public(execution, rank.rank) for execution, rank in ((one, mine), (other, theirs)))
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                raise Violation(
                    "what is public of a training depends on the size of its data set",
                    got=f"{name} = {b.get(name)!r} with {sizes[1]} records",
                    wanted=f"{a.get(name)!r}, as with {sizes[0]}",
                    where=f"rank {mine.rank}",
                    cause=partial(_of_size, name),
                )


def _public(execution: Execution, rank: int) -> dict[str, float | int | str]:
    (found,) = (value for who, _, _, value in execution.ranks[rank].observations if who == ENGINE)
    return dict(found)


def _together(entries: list[Entry]) -> list[Entry]:
    """Entries with those that follow each other and are alike put into one."""
    found: list[Entry] = []
    for multiplier, rate, steps in entries:
        if found and found[-1][:2] == (multiplier, rate):
            found[-1] = (multiplier, rate, found[-1][2] + steps)
        else:
            found.append((multiplier, rate, steps))
    return found


def _words(entry: Entry) -> str:
    multiplier, rate, steps = entry
    return f"{steps} steps of noise multiplier {multiplier!r} at rate {rate!r}"


def _of_entries(case: TrainingCase, rate: float, step: int, told: list[Entry], resumed: bool) -> Causes:
    return list(_fitting(case, rate, step, told, resumed))


def _fitting(case: TrainingCase, rate: float, step: int, told: list[Entry], resumed: bool) -> Iterator[Cause]:
    steps, wanted = sum(entry[2] for entry in told), step + 1
    rates, multipliers = {entry[1] for entry in told}, {entry[0] for entry in told}
    if steps == 1 and wanted > 1 and resumed:
        yield Cause("accounts lost", "what was told before a checkpoint does not come back with it")
    if case.step.micro_batches > 1 and steps == wanted * case.step.micro_batches:
        yield Cause("micro-batches", "micro-batches are counted, and not steps")
    for number, words in ((case.world_size, "ranks"), (case.step.micro_batches, "micro-batches")):
        for factor, done in ((number, "multiplied by"), (1 / number, "divided by")):
            if number > 1 and all(math.isclose(each, rate * factor, rel_tol=2**-40) for each in rates) and rates:
                yield Cause(f"rate {done} {words}", f"the rate that is told is {done} the number of {words}")
    if told and multipliers != {case.step.noise_multiplier}:
        yield Cause("another multiplier", "another noise multiplier is told than steps have")


def _of_size(name: str) -> Causes:
    return [Cause(f"{name} of the size", f"{name} follows from the size of the data set, which a record changes")]
