"""Checks of how a training starts: where every rank has built another model, and where parameters have many bits."""

from __future__ import annotations

from functools import partial

from fsdpcheck import diagnosis
from fsdpcheck.checks._compare import alike, differing, require_equal
from fsdpcheck.checks._read import completed
from fsdpcheck.diagnosis.bits import rounded
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Probe


def assert_starts_from_rank_0(execution: Execution, answer: Answer) -> None:
    """Before the first step every rank, of every replica, shows what rank 0 has built, bit for bit.

    Raises UsageError for a run without probes.start_apart, or one whose ranks have built an element alike: it would
    hold of an implementation that broadcasts nothing.
    """
    ranks = completed(execution)
    built = [_built(execution, rank, probes.start_apart) for rank in range(len(ranks))]
    _require_apart(built, answer.steps[0].before)
    cause = partial(diagnosis.of_start, answer.case, built, [result.initial for result in ranks])
    for result in ranks:
        what = "training does not start from what rank 0 has built"
        require_equal(what, result.initial, built[0], f"rank {result.rank}", cause)


def assert_starts_unrounded(execution: Execution) -> None:
    """Before the first step every rank shows parameters of more bits than a bfloat16's as they were built, bit for bit.

    Raises UsageError for a run without probes.start_between, or one whose parameters would come through a bfloat16.
    """
    for result in completed(execution):
        built = _built(execution, result.rank, probes.start_between)
        if not all(bool(differing(value, rounded(value, _BITS)).all()) for value in built.values()):
            raise UsageError(f"rank {result.rank} has built elements of few bits; next: take integer weights below 2^8")
        cause = partial(diagnosis.of_rounded_start, built, result.initial)
        require_equal("training starts from rounded parameters", result.initial, built, f"rank {result.rank}", cause)


_BITS = 8
"""Of a significand of a bfloat16."""


def assert_computes_with_buffers_of_rank_0(execution: Execution, answer: Answer, gives: Probe) -> None:
    """In the first forward each rank, of every replica, computes with the buffers that rank 0 has built, bit for bit.

    ``gives``: the probe that gave them. Raises UsageError for a run without it, and NotExact for one in which a rank
    calls no module that has such a buffer: with what it computes is then not known.
    """
    ranks = completed(execution)
    noted = [[value for _, _, value in gives.saw(result)] for result in ranks]
    if not all(noted):
        raise UsageError(f"ranks noted no buffers that they have built; next: run with {gives.name}")
    built: list[Named] = [own[0] for own in noted]
    used: list[Named] = [{name: value for one in own[1:] for name, value in one.items()} for own in noted]
    if not all(used):
        raise NotExact("some rank calls no module that has a buffer")
    cause = partial(diagnosis.of_buffers, answer.case, built, used)
    for rank, own in enumerate(used):
        wanted = {name: built[0][name] for name in own}
        require_equal("a buffer is not what rank 0 has built", own, wanted, f"rank {rank}", cause)


def _built(execution: Execution, rank: int, gave: Probe) -> Named:
    """The parameters that a rank has built, as the probe changed them."""
    noted = [value for _, _, value in gave.saw(execution.ranks[rank])]
    if not noted:
        raise UsageError(f"rank {rank} noted no parameters that it has built; next: run with {gave.name}")
    found: Named = noted[0]
    return found


def _require_apart(built: list[Named], right: Named) -> None:
    """Rank 0 has built the case's model, and every other rank one that differs from it in each element."""
    if built[0].keys() != right.keys() or not all(alike(built[0][name], value) for name, value in right.items()):
        raise UsageError("rank 0 has not built the case's model; next: let probes.start_apart change the others only")
    for rank, own in enumerate(built[1:], 1):
        for name, value in own.items():
            if not bool(differing(value, right[name]).all()):
                raise UsageError(
                    f"rank {rank} has built elements of {name} as rank 0; next: take small integer weights"
                )
