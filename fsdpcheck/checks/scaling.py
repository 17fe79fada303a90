"""Checks of two runs of one case whose losses differ by a power of two: what is linear in them differs by that alone.

Multiplying by a power of two is exact, and commutes with every rounding as long as nothing underflows or overflows. So
no answer is needed, and real numbers and true functions are compared bit for bit.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fsdpcheck.checks.comparing import (
    differing,
    form,
    require_equal,
    require_no_row,
    require_row_form,
    unknown,
)
from fsdpcheck.checks.recorded import completed, local_samples, recorded, shows
from fsdpcheck.errors import Violation
from fsdpcheck.execution import Execution
from fsdpcheck.suspects import Suspect

TIMES = 2.0**-30
"""What the losses are multiplied by. Smaller, so that a sample below the clip norm stays below it."""


def assert_scaled(whole: Execution, scaled: Execution, clip_norm: float) -> None:
    """At the first step norms of ``scaled`` are ``TIMES`` those of ``whole``; gradients too if nothing was clipped.

    Bit for bit. Gradients are compared where both runs recorded them and all norms of ``whole`` are below half the
    ``clip_norm``, so that every clip factor is 1 by any rule.
    """
    completed(whole), completed(scaled)
    case = whole.request.case
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


def _of_floor(wanted: Tensor, got: Tensor) -> list[Suspect]:
    """An absolute constant in the norm shows in small ones: it is a floor, or is added."""
    wrong = differing(got, wanted)
    if bool((got[wrong] > wanted[wrong]).all()) and len(torch.unique(got[wrong])) == 1:
        return [Suspect("floor", f"small norms are replaced by {float(got[wrong][0])!r}, a constant of its own")]
    return []
