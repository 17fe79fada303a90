"""Checks of two runs of one case whose losses differ by a power of two: what is linear in them differs by that alone.

Multiplying by a power of two is exact, and commutes with every rounding as long as nothing underflows or overflows. So
no answer is needed, and real numbers and true functions are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fsdpcheck import diagnosis
from fsdpcheck.checks._compare import alike, differing, form, require_equal, require_no_row, require_row_form, unknown
from fsdpcheck.checks._read import completed, local_samples, recorded, shows
from fsdpcheck.checks.shape_matched_replay import local_gradient, parameters_before
from fsdpcheck.checks.training import assert_same_execution
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, StepRecord
from fsdpcheck.findings.cause import Cause
from fsdpcheck.findings.violation import Violation
from fsdpcheck.workload import batches, models

TWICE = 2.0
"""What the losses of a training that is run again are multiplied by."""
TIMES = 2.0**-30
"""What the losses are multiplied by. Smaller, so that a sample below the clip norm stays below it."""


def assert_scaled(whole: Execution, scaled: Execution, clip_norm: float) -> None:
    """At the first step norms of ``scaled`` are ``TIMES`` those of ``whole``; gradients too if nothing was clipped.

    Bit for bit. Gradients are compared where both runs recorded them and all norms of ``whole`` are below half the
    ``clip_norm``, so that every clip factor is 1 by any rule.
    """
    completed(whole), completed(scaled)
    case = whole.request.training
    clips = False
    for (rank, one), (_, two) in zip(recorded(whole, 0, "norms"), recorded(scaled, 0, "norms"), strict=True):
        what, samples = "norms do not grow with the losses", local_samples(case, 0, rank)
        if len(one) != len(samples):
            raise Violation("not every sample has a norm", got=form(one), wanted=f"{len(samples)} norms",
                            where=f"step 0, rank {rank}")  # fmt: skip
        require_row_form(what, two, one, f"step 0, rank {rank}")
        where = f"step 0, rank {rank}, losses times {TIMES!r}"
        cause = partial(_of_floor, one * TIMES, two)
        mask = differing(two, one * TIMES)
        require_no_row(what, two, one * TIMES, mask, samples, where, cause)
        clips = clips or bool((one >= clip_norm / 2).any())
    if clips or not (shows(whole, 0, "grads") and shows(scaled, 0, "grads")):
        return
    for (rank, a), (_, b) in zip(recorded(whole, 0, "grads"), recorded(scaled, 0, "grads"), strict=True):
        wanted = {name: value * TIMES for name, value in a.items()}
        where = f"step 0, rank {rank}, losses times {TIMES!r}"
        require_equal("the unclipped gradient does not grow with the losses", b, wanted, where, unknown)


def assert_same_in_doubled_losses(first: Execution, second: Execution) -> None:
    """``second``, with losses ``TWICE`` as large and half the learning rate, recorded the same bits as ``first``, but
    for gradients, which are twice as large; and the same calls.

    Raises NotExact where the ranks' own gradients, replayed, do not double: something underflows or overflows.
    """
    ranks = [replace(result, steps=[_doubled(record) for record in result.steps]) for result in first.ranks]
    wanted = replace(first, ranks=ranks)
    try:
        assert_same_execution(wanted, second, partial(diagnosis.stale_state.repeated, wanted, second))
    except Violation:
        if first.failure is None and not _doubles(first):
            raise NotExact("losses times 2: gradients leave the range in which they double exactly") from None
        raise


def _doubled(record: StepRecord) -> StepRecord:
    grads = record.grads
    return replace(record, grads=grads and {name: value * TWICE for name, value in grads.items()})


def _doubles(execution: Execution) -> bool:
    """Whether each rank's own gradients of each micro-batch double with the losses, and none is near an underflow."""
    case, dtype = execution.request.training, models.DTYPES[execution.request.training.arithmetic.dtype]
    for result in execution.ranks:
        for k in range(len(result.steps)):
            before = parameters_before(result, k, case)
            batch = batches.batch(
                case, k, result.rank, execution.request.instrument, averages=execution.request.averages
            )
            for micro in batch.micro_batches:
                once = torch.full((len(micro.indices),), batch.loss_scale, dtype=dtype)
                one, two = (local_gradient(case, before, micro, w, result.placement) for w in (once, TWICE * once))
                if not all(_normal(one[name]) and alike(two[name], one[name] * TWICE) for name in one):
                    return False
    return True


def _normal(value: Tensor) -> bool:
    """Whether no rounding error of a number that is not zero is below the smallest normal number."""
    kind = torch.finfo(value.dtype)
    return not bool(((value != 0) & (value.abs() < kind.tiny / kind.eps)).any())


def _of_floor(wanted: Tensor, got: Tensor) -> list[Cause]:
    """An absolute constant in the norm shows in small ones: it is a floor, or is added."""
    wrong = differing(got, wanted)
    if bool((got[wrong] > wanted[wrong]).all()) and len(torch.unique(got[wrong])) == 1:
        return [Cause("floor", f"small norms are replaced by {float(got[wrong][0])!r}, a constant of its own")]
    return []
