"""Checks of features: a training that uses one has the bits of one that does not, and does use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdpcheck.adapters.contract import Use
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import first_apart
from fsdpcheck.checks._read import completed, shows
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer, batched_step
from fsdpcheck.program import probes
from fsdpcheck.program.probe import GRAPHS
from fsdpcheck.workload import models, numerics

Footprint = tuple[object, ...]


def assert_right(execution: Execution, answer: Answer) -> None:
    """Parameters, and gradients where they were recorded, are the single device's, bit for bit."""
    completed(execution)
    if all(shows(execution, step, "grads") for step in range(len(answer.steps))):
        assert_gradients_equal(execution, answer)
    assert_parameters_equal(execution, answer)


def assert_right_with(use: Use, execution: Execution, answer: Answer) -> None:
    """``assert_right`` of a run that uses a feature, where the one without it is right: so it is the feature."""
    try:
        assert_right(execution, answer)
    except Violation as found:
        if execution.failure is not None:
            raise
        cause = f"the training is right without {use}, so what {use} does is wrong"
        raise Violation(found.what, got=found.got, wanted=found.wanted, where=found.where, cause=cause) from None


def assert_in_effect(without: Execution, using: Execution, use: Use) -> None:
    """On some rank the feature shows: in collectives, when layers run between them, how parameters lie, or graphs.

    Both runs are completed. A feature that does nothing would be right in every bit, and be no feature.
    What a trainer calls while it is built counts for the feature "meta" alone, which is about nothing else.
    """
    if in_effect(without, using, use):
        return
    raise Violation(
        f"{use} has no effect",
        got="the same collectives, forwards, placements and graphs as without it, on every rank",
        wanted="something else on some rank",
        where="the run as a whole",
        cause=f"what {use} asks for is dropped without a word",
    )


def in_effect(without: Execution, using: Execution, use: Use) -> bool:
    """Whether the feature shows on some rank."""
    pairs = zip(completed(without), completed(using), strict=True)
    return any(footprint(a, use == "meta") != footprint(b, use == "meta") for a, b in pairs)


def assert_same_collectives(without: Execution, using: Execution, use: Use) -> None:
    """Since its trainer was built every rank called the same collectives: order, operations, groups, types, sizes."""
    for one, other in zip(completed(without), completed(using), strict=True):
        mine, theirs = _calls(one), _calls(other)
        if (at := first_apart(mine, theirs)) is not None:
            raise Violation(
                f"{use} changes the collectives",
                got=str(theirs[at]) if at < len(theirs) else f"{len(theirs)} collectives",
                wanted=str(mine[at]) if at < len(mine) else f"{len(mine)} collectives",
                where=f"collective {at} of rank {one.rank}",
            )


def has_slopes(execution: Execution) -> bool:
    """Whether any rank's losses have a gradient that is not zero, in a run with probes.footprint."""
    noted = (value for rank in execution.ranks for _, _, value in probes.footprint.saw(rank))
    return any(isinstance(value, tuple) and value[0] == probes.SLOPE and value[1] for value in noted)


def backward_reads_units(case: TrainingCase, answer: Answer) -> bool:
    """Whether the single device's backward reads anything that the forward of a unit, or of a model without, has kept.

    Only then is there something to compute again: units whose parameters are all frozen, at the front, keep nothing.
    """
    step = next((step for step in answer.steps if step.samples), None)
    if step is None:
        return False
    model, read = models.wide(case), []

    def unpack(kept: Tensor) -> Tensor:
        read.append(kept)
        return kept

    batched_step.load(model, step)
    for name in [name for names in models.unit_names(case) for name in names] or [""]:
        unit = model.get_submodule(name)
        unit.forward = _under(saved_tensors_hooks(lambda kept: kept, unpack), unit.forward)
    with numerics.of(case):
        inputs, targets = batched_step.data(case, step, range(len(step.samples)))
        losses = batched_step.loss(case)(model(inputs), targets)
        batched_step.gradients(losses, batched_step.trained(model), torch.ones_like(losses), keep=False)
    return bool(read)


def _under(hooks: saved_tensors_hooks, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        with hooks:
            return forward(*inputs, **named)

    return run


def count(execution: Execution, op: str) -> list[int]:
    """How many calls of one kind each rank made, on groups of several ranks."""
    return [Counter(call.op for call in rank.trace if len(call.group) > 1)[op] for rank in completed(execution)]


def footprint(result: RankResult, set_up: bool = False) -> Footprint:
    """What a rank's run shows of its features: a function of the case and of what it uses, whatever ran before it.

    Collectives since the trainer was built (with ``set_up``, all), what probes noted, and how many graphs were made.
    Raises UsageError for a run without probes.set_up.
    """
    calls = _calls(result, set_up)
    notes = tuple(repr(value) for name, _, _, value in result.observations if name in (probes.footprint.name, GRAPHS))
    return calls, notes, sum(name == GRAPHS for name, *_ in result.observations)


def _calls(result: RankResult, set_up: bool = False) -> tuple[Footprint, ...]:
    """What a rank called since its trainer was built; with ``set_up``, all."""
    built = [value for _, _, value in probes.set_up.saw(result)]
    if not built:
        raise UsageError(f"rank {result.rank} noted no end of its set-up; next: run with probes.set_up")
    trace = result.trace if set_up else result.trace[built[0] :]
    return tuple((call.op, call.reduce_op, call.group, call.inputs, call.outputs) for call in trace)
