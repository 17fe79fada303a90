"""Checks of a parameter that is frozen at first and thawed between two steps: it is trained from then on, or refused.

What an implementation took note of when it was built - which gradients to expect, to reduce, to give room to - is
otherwise from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.refused_samples import assert_refused_or_trained
from fsdpcheck.errors import NotApplicable
from fsdpcheck.execution import Execution
from fsdpcheck.oracle import Answer

_BEHIND = "with its first layer frozen in the first step, and thawed behind it"
_KEPT = "what is thawed behind the first step is treated as before: look at requires_grad in each step, or refuse"


def with_thawed_layer(case: TrainingCase) -> TrainingCase:
    """The case with its first layer that shares no weight frozen in the first step, and thawed behind it.

    Raises NotApplicable where every layer shares one.
    """
    layers = list(case.model.layers)
    place = next((n for n in range(len(layers)) if n not in (case.model.tied or ())), None)
    if place is None:
        raise NotApplicable("every layer shares its weight with another: both would have to be frozen")
    layers[place] = replace(layers[place], frozen="all" if layers[place].bias else "weight")
    step = replace(case.step, steps=max(2, case.step.steps), thaws=True)
    return replace(case, model=replace(case.model, layers=tuple(layers)), step=step)


def assert_refused_or_thawed(
    execution: Execution, answer: Answer, without: Callable[[], tuple[Execution, Answer]]
) -> None:
    """Thawing is refused, or trains (see refused_samples.assert_refused_or_trained)."""
    assert_refused_or_trained(execution, answer, without, _BEHIND, _KEPT)
