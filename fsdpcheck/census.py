"""Census: what the judged cases were like, so that a pass on trivial cases cannot look like a pass."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpcheck.case import Case
from fsdpcheck.oracle import Answer


def labels(case: Case, answer: Answer) -> tuple[str, ...]:
    """Everything that one judged case is counted under."""
    return (f"W={case.world_size}", *sorted(case.requires()), *_computed(case, answer))


def _computed(case: Case, answer: Answer) -> Iterator[str]:
    if len(case.model.units) > 1:
        yield "several units"
    if case.step.steps > 1:
        yield "several steps"
    if any((step.factors < 1).any() for step in answer.steps):
        yield "clipped sample"
    if any(gradient.any() for step in answer.steps for gradient in step.released.values()):
        yield "non-zero gradient"
