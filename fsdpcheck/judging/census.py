"""Census: how many judged cases were of each kind, so that a pass on trivial cases does not look like a pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.certifier import BFLOAT16
from fsdpcheck.exact.grid import significand_bits
from fsdpcheck.judging import coverage
from fsdpcheck.judging.model_process import called
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import Answer
from fsdpcheck.workload.clip_groups import is_instrument


def labels(case: Case, run: Run) -> tuple[str, ...]:
    """Everything that one judged case of ``run`` is counted under.

    A law may have judged other cases made from it; what is computed of it is left out where it is not exact itself.
    """
    tier = run.tier(case)
    told = (f"W={case.world_size}", f"tier {tier}", *sorted(case.requires()), *coverage.facts(case))
    if not isinstance(case, TrainingCase):
        return told
    try:
        return (*told, *(_shown(run) if tier == "replay" else called(case, computed, case, run)))
    except NotExact:
        return told


def computed(case: TrainingCase, run: Run) -> tuple[str, ...]:
    """Of these labels those that only the right answer tells. Raises what it raises."""
    return tuple(_computed(run.answer(case)))


def _computed(answer: Answer) -> Iterator[str]:
    if any((step.factors < 1).any() for step in answer.steps):
        yield coverage.CLIPPED
    if answer.case.step.private and any((step.factors == 1).any() for step in answer.steps):
        yield coverage.UNCLIPPED
    if any(g.any() for step in answer.steps for name, g in step.released.items() if not is_instrument(name)):
        yield coverage.GRADIENT
    if answer.case.arithmetic.compute == "bfloat16":
        yield from _in_few_bits(answer)
    if answer.case.step.optimizer.kind in ("adam", "adamw") and _leaves_out(answer):
        yield coverage.LEFT_OUT
    bound = answer.case.step.max_grad_norm
    if bound is not None and any(step.grad_norm > bound for step in answer.steps):
        yield coverage.CLIPPED_NORM


def _leaves_out(answer: Answer) -> bool:
    """Whether a step with samples leaves out a parameter that a later one has a gradient of that is not zero."""
    missing = set[str]()
    for step in answer.steps:
        if any(step.released[name].any() for name in missing & step.reached):
            return True
        missing |= {*step.gradients} - step.reached if step.samples else set()
    return False


def _in_few_bits(answer: Answer) -> Iterator[str]:
    """Of any parameter of the model; one of them may have it alone."""
    first = {name: value for name, value in answer.steps[0].before.items() if not is_instrument(name)}
    for step in answer.steps:
        if any(significand_bits(step.released[name]) > BFLOAT16.result for name in first.keys() & step.released):
            yield coverage.MANY_BITS
            break
    if any(not torch.equal(step.before[name], first[name]) for step in answer.steps for name in first):
        yield coverage.OTHER_START


def _shown(run: Run) -> Iterator[str]:
    """Of real numbers there is no answer: what the ranks reported in the newest run."""
    ranks = run.ran.newest.ranks if run.ran.newest else []
    factors = [step.factors for rank in ranks for step in rank.steps if step.factors is not None]
    if any((own < 1).any() for own in factors):
        yield coverage.CLIPPED
    if any((own == 1).any() for own in factors):
        yield coverage.UNCLIPPED
