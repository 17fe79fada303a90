"""Checks of a training: parameters, gradients, padding, norms and messages are compared bit for bit.

Zeros of either sign are equal.

Legend: n samples of a step, b on one rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fsdpcheck import diagnosis
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks import square_roots
from fsdpcheck.checks._compare import alike, first_index, number, require_equal, unknown
from fsdpcheck.checks._moments import OF_PADDING, require_announced, require_gradients
from fsdpcheck.checks._read import completed, poisoned, recorded, require_numbers
from fsdpcheck.checks.clipping import comparable
from fsdpcheck.errors import NotApplicable, UsageError
from fsdpcheck.execution import Execution, RankResult, StepRecord
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.cause import Causes
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.oracle import Answer
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Probe
from fsdpcheck.workload import batches, models


def assert_completed(execution: Execution) -> None:
    """Every rank took every step; otherwise the failure's report is the violation."""
    completed(execution)


def assert_parameters_equal(execution: Execution, answer: Answer) -> None:
    """After every step every rank shows the single device's parameters, bit for bit; and before the first one."""
    what = "the parameters are not the single device's"
    for result in completed(execution):
        where = f"before the first step, rank {result.rank}"
        right = answer.steps[0].before
        everyone = [own.initial for own in execution.ranks]
        before: Diagnose = partial(diagnosis.of_initial, answer, result.initial, everyone)
        require_equal(what, result.initial, right, where, poisoned(execution, result.initial, before))
    for k, step in enumerate(answer.steps):
        for result in execution.ranks:
            got = result.steps[k].params
            cause = partial(diagnosis.of_update, answer, k, got)
            where = f"step {k}, rank {result.rank}"
            require_equal(what, got, step.after, where, poisoned(execution, got, cause))


def right(execution: Execution, answer: Answer) -> bool:
    """Whether a run shows the single device's parameters."""
    try:
        assert_parameters_equal(execution, answer)
    except Violation:
        return False
    return True


def assert_gradients_equal(execution: Execution, answer: Answer) -> None:
    """The gradient the optimizer used at every step is the single device's, on every rank, bit for bit."""
    completed(execution)
    for k, step in enumerate(answer.steps):
        for rank, got in recorded(execution, k, "grads"):
            where, what = f"step {k}, rank {rank}", "the gradient is not the single device's"
            if text := diagnosis.conventions.of_names(answer, k, got):
                shown, wanted = (f"of {sorted(names)}" for names in (got, step.used))
                raise Violation(what, got=shown, wanted=wanted, where=where, cause=text)
            require_equal(what, got, step.used, where, partial(diagnosis.of_gradient, answer, k, got))


def assert_outputs_equal(execution: Execution, answer: Answer) -> None:
    """Before each step each rank got the single device's outputs of its first micro-batch, bit for bit."""
    what = "the outputs of an evaluation are not the single device's"
    dtype, none = models.DTYPES[answer.case.arithmetic.dtype], torch.zeros(0, models.outputs(answer.case))
    completed(execution)
    for k, step in enumerate(answer.steps):
        for result, chunks in zip(execution.ranks, batches.indices(answer.case, k), strict=True):
            got, rows = result.steps[k].outputs, [step.samples.index(sample) for sample in chunks[0]]
            if got is None:
                raise UsageError("no outputs were recorded; next: ask for a case that evaluates")
            wanted = {"outputs": (step.outputs[rows] if rows else none).to(dtype)}
            require_equal(what, {"outputs": got}, wanted, f"before step {k}, rank {result.rank}", unknown)


def assert_ranks_agree(execution: Execution) -> None:
    """All ranks show the same parameters, full gradients and global norms, before the first and after every step."""
    first, *others = completed(execution)
    for other in others:
        for moment, a, b in _shared(first, other):
            where = f"{moment}, rank {other.rank} against rank {first.rank}"
            require_equal("the ranks do not agree", b, a, where, unknown)


def assert_padding_zero(execution: Execution) -> None:
    """All padding that probes.padding saw was zero: after init, and in each step behind reduction, clipping, update.

    Raises NotApplicable where no rank has any, AdapterError where one of these moments was not announced, in any step
    on any rank, and UsageError for a run without the probe.
    """
    _require_looked_at(execution, probes.padding)
    elements = 0
    for result in execution.ranks:
        for moment, step, value in probes.padding.saw(result):
            for name, padding in value.items():
                elements += padding.numel()
                wrong = (padding != 0) | padding.isnan()
                if bool(wrong.any()):
                    index = first_index(wrong)
                    where = f"{moment}, step {step}, rank {result.rank}, shard {name}, padding{list(index)}"
                    got = number(padding[index])
                    cause = partial(diagnosis.of_padding, moment, name)
                    raise Violation("padding is not zero", got=got, wanted="0.0", where=where, cause=cause)
    _require_padding(elements)


def assert_padding_poisoned(execution: Execution) -> None:
    """The run wrote NaN into padding, so that what it shows says something of padding that is read.

    Behind init, and in each step before clipping, before the optimizer and before the next forward. Raises
    NotApplicable where there is none, AdapterError where one of these moments was not announced, in any step on any
    rank, and UsageError for a run without probes.poison_padding.
    """
    _require_looked_at(execution, probes.poison_padding)
    written = [count for rank in execution.ranks for _, _, count in probes.poison_padding.saw(rank)]
    _require_padding(sum(written))


def assert_norms_in_dataset_order(execution: Execution, answer: Answer) -> None:
    """On every rank: each entry of the logical batch by ascending sample, with its own norm, bit for bit.

    A sample that occurs twice stands twice, and is listed. Reads what ``probes.ordered_norms`` returned. Steps behind
    one that left the answer's path within its bound are not compared (see ``clipping.comparable``).
    """
    what, steps = "the norms are not reported in dataset order", [*comparable(execution, answer)]
    for result in completed(execution):
        reports = {step: value for _, step, value in probes.ordered_norms.saw(result)}
        if len(reports) != len(answer.steps):
            raise UsageError("no ordered norms were observed; next: run with probes.ordered_norms")
        for k, step in steps:
            got = reports[k]
            twice = [s for s, count in zip(step.samples, step.multiplicity, strict=True) if count > 1]
            times = torch.tensor(step.multiplicity)
            wanted = {
                "indices": torch.tensor(step.samples).repeat_interleave(times),
                "duplicates": torch.tensor(twice, dtype=torch.int64),
                "norms": square_roots.in_order(answer, step, times, got.get("norms")),
            }
            cause = partial(diagnosis.of_order, answer.case, k, step, got["norms"]) if "norms" in got else unknown
            require_equal(what, got, wanted, f"step {k}, rank {result.rank}", cause)


def assert_same_execution(
    a: Execution, b: Execution, cause: Diagnose = unknown, what: str = "two runs of one case differ"
) -> None:
    """Two runs gave the same bits in everything recorded, the same traces rank by rank, and the same failure if any.

    ``cause`` is asked where they recorded other bits.
    """
    kinds = [execution.failure.kind if execution.failure else "none" for execution in (a, b)]
    if kinds[0] != kinds[1]:
        raise Violation(what, got=f"failure: {kinds[1]}", wanted=f"failure: {kinds[0]}", where="the runs as a whole")
    for execution in (a, b):
        require_numbers(execution)
    if len(a.ranks) != len(b.ranks):
        raise Violation(what, got=f"{len(b.ranks)} ranks", wanted=f"{len(a.ranks)} ranks", where="the runs as a whole")
    for one, two in zip(a.ranks, b.ranks, strict=True):
        _same_results(what, one, two, cause)
        _same_calls(what, list(one.trace), list(two.trace), f"trace of rank {two.rank}")


def assert_deferred_equals_immediate(deferred: Execution, immediate: Execution) -> None:
    """Two completed runs, one with deferred and one with immediate norms, recorded the same bits; traces may differ."""
    case = deferred.request.training
    for one, two in zip(completed(immediate), completed(deferred), strict=True):
        cause = partial(_of_deferred, case, one, two)
        _same_results("deferred norms are not the immediate ones", one, two, cause)


def _of_deferred(case: TrainingCase, immediate: RankResult, deferred: RankResult) -> Causes | None:
    """Causes of the first norms of a rank that differ; none where the norms are equal or were not recorded."""
    seen: list[tuple[Tensor, Tensor]] = []
    for one, two in zip(immediate.steps, deferred.steps, strict=False):
        if one.norms is None or two.norms is None or one.norms.shape != two.norms.shape:
            return None
        seen.append((one.norms, two.norms))
        if not alike(one.norms, two.norms):
            rights, found = zip(*seen, strict=True)
            return diagnosis.of_deferred(case, rights, found, len(seen) - 1)
    return None


def assert_collectives_equal(execution: Execution) -> None:
    """On each group all members called the same collectives in the same order, for the same unit where it is known.

    Messages are no collectives: one rank sends what another receives, or the run does not end.
    """
    what = "the ranks do not call the same collectives"
    calls = {result.rank: _by_group(result) for result in completed(execution)}
    groups = sorted({key for own in calls.values() for key in own})
    for name, members in groups:
        first, *others = [rank for rank in members if rank in calls]
        for other in others:
            mine, theirs = calls[first].get((name, members), []), calls[other].get((name, members), [])
            _same_calls(what, mine, theirs, f"group {name!r}, rank {other} against rank {first}")


def _require_looked_at(execution: Execution, probe: Probe) -> None:
    """At every moment of which something is said of padding."""
    if not any(probe.saw(rank) for rank in completed(execution)):
        raise UsageError(f"the run did not look at padding; next: run it with the probe {probe.name}")
    require_announced(execution, probe, OF_PADDING)
    require_gradients(execution, probe)


def _require_padding(elements: int) -> None:
    if not elements:
        raise NotApplicable("no rank has padding in this case, so nothing is said of it")


def _shared(first: RankResult, other: RankResult) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """(moment, one rank's, another rank's) of what all ranks must agree on."""
    yield "before the first step", first.initial, other.initial
    for k, (a, b) in enumerate(zip(first.steps, other.steps, strict=True)):
        yield f"step {k}, parameters", a.params, b.params
        if a.grads is not None and b.grads is not None:
            yield f"step {k}, gradients", a.grads, b.grads
        if a.grad_norm is not None and b.grad_norm is not None:
            yield f"step {k}", {"grad_norm": a.grad_norm}, {"grad_norm": b.grad_norm}


def _same_results(what: str, one: RankResult, two: RankResult, cause: Diagnose = unknown) -> None:
    where = f"rank {two.rank}"
    require_equal(what, two.initial, one.initial, f"{where}, before the first step", cause)
    if len(one.steps) != len(two.steps):
        raise Violation(what, got=f"{len(two.steps)} steps", wanted=f"{len(one.steps)} steps", where=where)
    for k, (a, b) in enumerate(zip(one.steps, two.steps, strict=True)):
        require_equal(what, b.params, a.params, f"step {k}, {where}, parameters", cause)
        if a.grads is not None and b.grads is not None:
            require_equal(what, b.grads, a.grads, f"step {k}, {where}, gradients", cause)
        _same_vectors(what, a, b, f"step {k}, {where}", cause)


def _same_vectors(what: str, a: StepRecord, b: StepRecord, where: str, cause: Diagnose) -> None:
    pairs = [("norms", a.norms, b.norms), ("factors", a.factors, b.factors), ("grad_norm", a.grad_norm, b.grad_norm)]
    for name, one, two in pairs:
        if not alike(one, two):
            raise Violation(what, got=_listed(two), wanted=_listed(one), where=f"{where}, {name}", cause=cause)
    if (a.grads is None) != (b.grads is None):
        raise Violation(what, got=_shown(b.grads), wanted=_shown(a.grads), where=f"{where}, gradients")


def _shown(value: object) -> str:
    return "not recorded" if value is None else "recorded"


def _listed(value: Tensor | None) -> str:
    return "not recorded" if value is None else repr(value.tolist())


def _by_group(result: RankResult) -> dict[tuple[str, tuple[int, ...]], list[Collective]]:
    """A rank's collectives by (name, members) of the group, in order."""
    calls: dict[tuple[str, tuple[int, ...]], list[Collective]] = {}
    for call in result.trace:
        if call.tag is None:
            calls.setdefault((call.group_name, call.group), []).append(call)
    return calls


def _same_calls(what: str, wanted: list[Collective], got: list[Collective], where: str) -> None:
    for place, (a, b) in enumerate(zip(wanted, got, strict=False)):
        if a.fingerprint != b.fingerprint or (a.subject != b.subject and a.subject and b.subject):
            raise Violation(what, got=str(b), wanted=str(a), where=f"{where}, call {place}")
    if len(wanted) != len(got):
        place = min(len(wanted), len(got))
        one = str(wanted[place]) if place < len(wanted) else "no further call"
        two = str(got[place]) if place < len(got) else "no further call"
        raise Violation(what, got=two, wanted=one, where=f"{where}, call {place}")
