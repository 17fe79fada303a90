"""Check of the global gradient norm in a step in which the gradient has one element that is NaN or infinite.

A single device returns NaN or an infinity (``torch.nn.utils.clip_grad_norm_``), or raises where it is asked to
(``error_if_nonfinite``). Where gradients are sharded one rank alone sees the element, and what it does then - leave the
all-reduce of the norm, raise, skip its update - the others have to do too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from fsdpcheck.checks._compare import number
from fsdpcheck.checks._read import completed, recorded
from fsdpcheck.checks.training import assert_ranks_agree
from fsdpcheck.diagnosis import global_norm
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, RankState
from fsdpcheck.findings.cause import Cause
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer


def assert_norm_not_finite(
    execution: Execution, without: Callable[[], Execution], answer: Callable[[], Answer] | None = None
) -> None:
    """Every rank ends the step with the same norm and parameters, and the norm is that of no finite gradient.

    That is NaN, an infinity, or a negative number, as DeepSpeed's -1. Or every rank raises at one line, of one type;
    then the run ``without`` the element completed, so that it is the element that is refused. ``answer`` is the single
    device's to the case without the element: a cause is looked for in the norms that ranks return there.
    """
    if _raised_alike(execution):
        completed(without())
        return
    _require_completed(execution, without)
    sample, value = execution.request.spoiled[0]
    for rank, norm in recorded(execution, 0, "grad_norm"):
        if _of_a_gradient(norm):
            raise Violation(
                "the norm of a gradient that is not finite is a number",
                got=number(norm),
                wanted="NaN, an infinity or a negative number on every rank, or an exception on every rank",
                where=f"step 0, rank {rank}; a target of sample {sample} is {value}",
                cause=lambda: _causes(execution, without, answer),
            )
    assert_ranks_agree(execution)


def _require_completed(execution: Execution, without: Callable[[], Execution]) -> None:
    try:
        completed(execution)
    except Violation as found:
        raise Violation(
            found.what, got=found.got, wanted=found.wanted, where=found.where, cause=lambda: _of_one_rank(without)
        ) from None


def _of_one_rank(without: Callable[[], Execution]) -> list[Cause]:
    """Whether it is the element over which ranks do not go on together."""
    if without().failure is not None:
        return []
    return [Cause("one rank", "a rank that has an element that is not finite leaves the others: without it all finish")]


def _raised_alike(execution: Execution) -> bool:
    """Whether every rank raised an exception of one type at one line: a rank whose peers have left raises elsewhere."""
    failure = execution.failure
    if failure is None or failure.kind != "raised" or len(failure.ranks) != execution.request.training.world_size:
        return False
    return all(rank.state == "raised" for rank in failure.ranks) and len({_raised(rank) for rank in failure.ranks}) == 1


def _raised(rank: RankState) -> tuple[str, str]:
    """(type of the exception, innermost frame) of what a rank raised."""
    frame = next((line for line in reversed(rank.stack) if line.startswith("  ")), "")
    return next((line.partition(":")[0] for line in reversed(rank.stack) if not line.startswith("  ")), ""), frame


def _of_a_gradient(norm: Tensor) -> bool:
    """Whether some finite gradient has this norm."""
    return bool((norm.isfinite() & (norm >= 0)).all())


def _causes(execution: Execution, without: Callable[[], Execution], answer: Callable[[], Answer] | None) -> list[Cause]:
    """Whether each rank returns the norm of what it owns, or all leave out what is not finite."""
    numbers = [_of_a_gradient(norm) for _, norm in recorded(execution, 0, "grad_norm")]
    if all(numbers):
        return [Cause("left out", "what is not finite is left out of the norm")]
    plain = without()
    if answer is not None and plain.failure is None:
        with suppress(NotExact):
            norms = [float(norm) for _, norm in recorded(plain, 0, "grad_norm")]
            if global_norm.are_of_own_shards(answer(), 0, norms):
                return [global_norm.OWN_SHARD]
    return [Cause("own", "a rank returns another norm than the one that has the element: the sum does not reach it")]
