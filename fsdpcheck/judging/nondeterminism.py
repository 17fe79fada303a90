"""Nondeterminism: whether an implementation gives other results for the same case, compared bit for bit.

It is asked where a law broke and then held on one case. The runs are on real gloo processes, whose ranks share no
memory of the harness: several runs in fresh processes each, then several in the same processes. The reference must give
one result on the case, or the single device must, where the reference does not take the case. Otherwise nothing is said
of the implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import zip_longest

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import KernelCase, TrainingCase, user_model
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.errors import excerpt
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.execution.trace import Collective, Trace
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.model_process import called
from fsdpcheck.judging.run import Run
from fsdpcheck.program.samplers import SAMPLER

RUNS = 5
"""How often a case is run, each way."""

ENGINES = ("simulated", "processes")
"""Engines beside which processes can be started."""

_REFERENCE = "reference"


def difference(run: Run, request: RunRequest) -> Violation | None:
    """The first difference between executions of ``request``; None if there is none, or the reference has one too.

    Raises nothing: where processes cannot be started, nothing is said.
    """
    if run.engine.name not in ENGINES or not _repeats(request):
        return None
    try:
        found = _of_fresh_processes(request) or _of_the_same_processes(request)
        return found if found is not None and _is_determined(run, request) else None
    except Exception:
        return None


def varies(run: Run, request: RunRequest) -> bool:
    """A cheap look: whether ``request`` gives other results when the engine of ``run`` runs it several times.

    The newest execution counts, if it is one of ``request``.
    """
    if not _repeats(request):
        return False
    newest = run.ran.newest
    first = newest if newest is not None and newest.request is request else run.engine.run(request)
    return any(first_difference(first, run.engine.run(request)) is not None for _ in range(RUNS - 1))


def first_difference(one: Execution, other: Execution) -> tuple[str, str, str] | None:
    """(where, value, other value) of the first difference between two executions of a case; None if there is none.

    It is in anything that ranks show: a bit of a value, a call, how they end.
    """
    failures = [f"{run.failure.kind}: {run.failure.text}" if run.failure else "a result" for run in (one, other)]
    if (one.failure is None) != (other.failure is None):
        return "the end of the run", failures[0], failures[1]
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        if one.failure is None and mine.trace != theirs.trace:
            number, call, other_call = _first_call(mine.trace, theirs.trace)
            return f"rank {mine.rank}, its collective {number}", call, other_call
        for (where, said), (_, other_said) in zip(_words(mine), _words(theirs), strict=False):
            if said != other_said:
                return f"rank {mine.rank}, {where}", excerpt.excerpt(str(said)), excerpt.excerpt(str(other_said))
        for (where, value), (_, again) in _pairs(mine, theirs):
            if _plain(value) != _plain(again):
                return f"rank {mine.rank}, {where}", *_shown(value, again)
    return None


def _repeats(request: RunRequest) -> bool:
    """Whether it can be run again: not with folders that are gone, nor without ranks."""
    return not request.save_to and not request.load_from and not isinstance(request.case, KernelCase)


def _of_fresh_processes(request: RunRequest, runs: int = RUNS) -> Violation | None:
    executions = (_alone(request) for _ in range(runs))
    return _among(executions, "the same case gives other results, each time in fresh processes", "in fresh processes")


def _of_the_same_processes(request: RunRequest, runs: int = RUNS) -> Violation | None:
    engine = ProcessesEngine()
    try:
        executions = (engine.run(request) for _ in range(runs))
        what = "the same case gives other results, depending on what ran before in the processes"
        return _among(executions, what, "one after another in the same processes")
    finally:
        engine.close()


def _alone(request: RunRequest) -> Execution:
    engine = ProcessesEngine()
    try:
        return engine.run(request)
    finally:
        engine.close()


def _among(executions: Iterator[Execution], what: str, how: str) -> Violation | None:
    first = next(executions)
    for number, other in enumerate(executions, 1):
        place = first_difference(first, other)
        if place is not None:
            where, before, now = place
            got = f"run {number} gave {now}"
            return Violation(what, got=got, wanted=f"in each run what run 0 gave: {before}", where=f"{where}; {how}")
    return None


def _is_determined(run: Run, request: RunRequest) -> bool:
    """Whether the reference, or else the single device, gives ``request`` the same results each time."""
    case, features = request.case, run.engine.declared(_REFERENCE).features
    known = user_model(case) is None and features.takes(case)
    if known and request.observe - {"params"} <= features.observables and not request.using:
        plain = replace(request, adapter=_REFERENCE, installs=(), probes=())
        return _of_fresh_processes(plain, 2) is None and _of_the_same_processes(plain, 2) is None
    if not isinstance(case, TrainingCase) or run.tier(case) == "replay":
        return True
    return called(case, answers_repeat, case, run.features.factor)


def answers_repeat(case: TrainingCase, rule: FactorRule) -> bool:
    """Whether the single device's answer is the same each time."""
    first, second = (oracle.answer(case, rule) for _ in range(2))
    return all(_bits(one.after) == _bits(two.after) for one, two in zip(first.steps, second.steps, strict=True))


def _first_call(mine: Trace, theirs: Trace) -> tuple[int, str, str]:
    """(number, call, other call) of the first that differ."""
    pairs = enumerate(zip_longest(mine, theirs))
    number, (call, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return number, *_told_apart(call, other)


def _told_apart(call: Collective | None, other: Collective | None) -> tuple[str, str]:
    """Both in words; where these are the same, by the fields that differ."""
    if call is None or other is None or str(call) != str(other):
        return str(call or "none"), str(other or "none")
    names = [field.name for field in fields(call) if field.compare]
    unlike = [name for name in names if getattr(call, name) != getattr(other, name)]
    one, two = (", ".join(f"{name} {getattr(of, name)!r}" for name in unlike) for of in (call, other))
    return one, two


def _pairs(one: RankResult, other: RankResult) -> Iterator[tuple[tuple[str, Tensor | None], tuple[str, Tensor | None]]]:
    """Values by place, of both; as many as both have."""
    return zip(_values(one), _values(other), strict=False)


def _words(result: RankResult) -> Iterator[tuple[str, object]]:
    """What a rank shows beside tensors, by place: what it drew, and what was reported to its accountant."""
    yield from ((f"the draws of epoch {epoch}", drawn) for by, _, epoch, drawn in result.observations if by == SAMPLER)
    yield from ((f"step {number}, what was accounted", step.accounted) for number, step in enumerate(result.steps))


def _values(result: RankResult) -> Iterator[tuple[str, Tensor | None]]:
    for name, value in result.initial.items():
        yield f"before the first step, {name}", value
    for number, step in enumerate(result.steps):
        for name, value in (step.grads or {}).items():
            yield f"step {number}, gradient of {name}", value
        for name, single in (("norms", step.norms), ("factors", step.factors), ("global norm", step.grad_norm)):
            yield f"step {number}, {name}", single
        yield f"step {number}, the outputs before it", step.outputs
        for name, value in step.params.items():
            yield f"step {number}, {name}", value


def _plain(value: Tensor | None) -> object:
    """The bits, so that a NaN is equal to itself."""
    if value is None:
        return None
    flat = value.reshape(-1).clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()


def _bits(values: dict[str, Tensor]) -> list[object]:
    return [_plain(value) for value in values.values()]


def _shown(one: Tensor | None, other: Tensor | None) -> tuple[str, str]:
    """Both values, of tensors of one shape the first element that differs."""
    if one is None or other is None or one.shape != other.shape:
        return str(one), str(other)
    pairs = zip(one.flatten(), other.flatten(), strict=True)
    number, (first, second) = next((n, pair) for n, pair in enumerate(pairs) if _plain(pair[0]) != _plain(pair[1]))
    return f"{first.item()!r} (element {number})", f"{second.item()!r} (element {number})"
