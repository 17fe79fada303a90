"""Checks of how a training starts where every rank has built another model."""

from __future__ import annotations

from functools import partial

from fsdpcheck import diagnosis
from fsdpcheck.checks._compare import alike, differing, require_equal
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.program import probes


def assert_starts_from_rank_0(execution: Execution, answer: Answer) -> None:
    """Before the first step every rank, of every replica, shows what rank 0 has built, bit for bit.

    Raises UsageError for a run without probes.start_apart, or one whose ranks have built an element alike: it would
    hold of an implementation that broadcasts nothing.
    """
    ranks = completed(execution)
    built = [_built(execution, rank) for rank in range(len(ranks))]
    _require_apart(built, answer.steps[0].before)
    cause = partial(diagnosis.of_start, answer.case, built, [result.initial for result in ranks])
    for result in ranks:
        what = "training does not start from what rank 0 has built"
        require_equal(what, result.initial, built[0], f"rank {result.rank}", cause)


def _built(execution: Execution, rank: int) -> Named:
    """The parameters that a rank has built."""
    noted = [value for _, _, value in probes.start_apart.saw(execution.ranks[rank])]
    if not noted:
        raise UsageError(f"rank {rank} noted no parameters that it has built; next: run with probes.start_apart")
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
