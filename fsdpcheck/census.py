"""Census: what the judged cases were like, so that a pass on trivial cases cannot look like a pass."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpcheck.case import Case
from fsdpcheck.errors import NotExact
from fsdpcheck.oracle import Answer
from fsdpcheck.runner import Run


def labels(case: Case, run: Run) -> tuple[str, ...]:
    """Everything that one judged case of ``run`` is counted under.

    A law may have judged other cases made from it; what is computed of it is left out where it is not exact itself.
    """
    tier = run.tier(case)
    if not case.trains:
        return (f"W={case.world_size}", f"tier {tier}", *sorted(case.requires()))
    try:
        computed = () if tier == "replay" else tuple(_computed(run.answer(case)))
    except NotExact:
        computed = ()
    return (f"W={case.world_size}", f"tier {tier}", *sorted(case.requires()), *_drawn(case), *computed)


def _drawn(case: Case) -> Iterator[str]:
    if case.model.unit_count > 1:
        yield "several units"
    if case.step.steps > 1:
        yield "several steps"


def _computed(answer: Answer) -> Iterator[str]:
    if any((step.factors < 1).any() for step in answer.steps):
        yield "clipped sample"
    if any(gradient.any() for step in answer.steps for gradient in step.released.values()):
        yield "non-zero gradient"
