"""Checks of invariance: two variants of a case must give the same bits where the change must not show.

The right answers of both are computed too, each proved exact. They say which of the two runs is wrong, and they are
compared with each other first: a pair whose right answers differ proves nothing and is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from fsdpcheck import diagnosis
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import alike, require_equal
from fsdpcheck.checks._read import completed, shows
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, StepRecord
from fsdpcheck.findings.cause import Causes
from fsdpcheck.findings.violation import Diagnose
from fsdpcheck.oracle import Answer
from fsdpcheck.workload.clip_groups import is_instrument

Named = dict[str, Tensor]
Side = tuple[Execution, Answer]
Explain = Callable[[int, StepRecord], Causes | None]
"""(step, what a rank of the second run recorded at it) -> causes."""


def assert_same_training(
    first: Side, second: Side, what: str, gradients: Explain | None = None, update: Explain | None = None
) -> None:
    """Every rank of both runs shows the same initial parameters, gradients (if recorded) and parameters at every step.

    Parameters are compared by their names without the unit. The instrument, whose size depends on W, is left out.
    ``gradients``: whom to ask where they differ; ``update``: where they are shown and equal, and parameters differ.
    """
    _require_same_answer(first[1], second[1])
    one, others = completed(first[0])[0], [*completed(first[0])[1:], *completed(second[0])]
    executions = [first[0]] * (len(first[0].ranks) - 1) + [second[0]] * len(second[0].ranks)
    reference = f"{_called(first[0].request.training)}, rank {one.rank}"
    for execution, other in zip(executions, others, strict=True):
        here = f"{_called(execution.request.training)}, rank {other.rank}, against {reference}"
        cause = _cause(None, first, second, -1)
        require_equal(what, _body(other.initial), _body(one.initial), f"before the first step, {here}", cause)
        for k, (got, wanted) in enumerate(zip(other.steps, one.steps, strict=True)):
            cause = _cause(gradients, first, second, k, got)
            if shows(first[0], k, "grads") and shows(second[0], k, "grads"):
                assert got.grads is not None
                assert wanted.grads is not None
                require_equal(what, _body(got.grads), _body(wanted.grads), f"step {k}, gradients, {here}", cause)
                cause = _cause(update, first, second, k, got)
            else:
                cause = _cause(None, first, second, k)
            require_equal(what, _body(got.params), _body(wanted.params), f"step {k}, {here}", cause)


def assert_initial_equal(execution: Execution, answer: Answer) -> None:
    """Before the first step every rank shows the parameters of the model that it was given, bit for bit."""
    what = "training starts from other parameters than the model has"
    for result in completed(execution):
        cause = partial(diagnosis.of_initial, answer, result.initial, [own.initial for own in execution.ranks])
        require_equal(what, result.initial, answer.steps[0].before, f"rank {result.rank}", cause)


def require_same_placement(first: Execution, second: Execution) -> None:
    """Raises NotExact if parameters lay at other alignments in two completed runs: kernels may round otherwise."""
    for one, two in zip(completed(first), completed(second), strict=True):
        if one.placement != two.placement:
            raise NotExact(f"rank {two.rank}: parameters lie at other alignments in the second run")


def local_name(parameter: str) -> str:
    """A parameter's name without its unit: "units.0.linear0.weight" and "tail.linear0.weight" are one layer's."""
    head, _, rest = parameter.partition(".")
    return rest.partition(".")[2] if head == "units" else rest if head == "tail" else parameter


def _cause(explain: Explain | None, first: Side, second: Side, k: int, got: StepRecord | None = None) -> Diagnose:
    """Asks ``explain``, or if None looks for what is wrong at step ``k`` of either run."""
    if explain is None or got is None:
        return partial(_of_wrong, first, second, k)
    return partial(explain, k, got)


def _body(named: Mapping[str, Tensor]) -> Named:
    return {local_name(name): value for name, value in named.items() if not is_instrument(name)}


def _require_same_answer(first: Answer, second: Answer) -> None:
    for k, (one, two) in enumerate(zip(first.steps, second.steps, strict=True)):
        for a, b in ((one.used, two.used), (one.after, two.after)):
            mine, other = _body(a), _body(b)
            if mine.keys() != other.keys() or not all(alike(mine[name], other[name]) for name in mine):
                raise NotExact(f"step {k}: the two siblings have different right answers, so nothing is to be compared")


def _called(case: TrainingCase) -> str:
    """What of a case its siblings may have otherwise."""
    mesh, step = case.mesh, case.step
    replicas = f" in {mesh.dp_replicate} replicas" if mesh.dp_replicate > 1 else ""
    kept = "" if mesh.reshard_after_forward else ", kept unsharded"
    return f"W = {case.world_size}{replicas}{kept}, K = {step.micro_batches}, units {list(case.model.units)}"


def _of_wrong(first: Side, second: Side, k: int) -> Causes | None:
    """Causes of the first run that is not its own right answer at step ``k`` (-1: before any).

    With noise only those of the noise, in the first step: later ones start from other parameters than the answer does.
    """
    if first[1].case.step.noise_multiplier:
        shown = [[own.steps[k].grads for own in execution.ranks] for execution, _ in (first, second)]
        if k or any(grads is None for own in shown for grads in own):
            return None
        one, two = ([grads for grads in own if grads is not None] for own in shown)
        return diagnosis.noise.of_siblings((first[1], one), (second[1], two))
    for execution, answer in (first, second):
        for result in execution.ranks:
            if k < 0:
                if _differs(result.initial, answer.steps[0].before):
                    everyone = [own.initial for own in execution.ranks]
                    return diagnosis.of_initial(answer, result.initial, everyone)
                continue
            record, step = result.steps[k], answer.steps[k]
            if record.grads is not None and _differs(record.grads, step.used):
                return diagnosis.of_gradient(answer, k, record.grads)
            if _differs(record.params, step.after):
                return diagnosis.of_update(answer, k, record.params)
    return None


def _differs(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return any(not alike(got.get(name), value) for name, value in wanted.items())
