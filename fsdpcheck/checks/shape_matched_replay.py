"""Shape-matched replay: what a step must give when its numbers round, from the same kernels on the same shapes.

With real numbers and true non-linearities no order of summation can be demanded, so the single device's answer is out
of reach bit for bit. What remains checkable without a chosen tolerance: run each rank's own micro-batches through the
unsharded model, in the same shapes, from the parameters the run itself recorded. The same kernels give the same local
gradients; only the sum over ranks and micro-batches may round, and by a theorem (Higham, Accuracy and Stability of
Numerical Algorithms, eq. 4.4) no order of adding n terms errs by more than gamma(n - 1) sum |terms|.

It cannot see a mistake both sides make alike, so it never replaces the exact tier.

Legend: W ranks, K micro-batches, b samples of one, N the normaliser.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from fsdpcheck import diagnosis, oracle
from fsdpcheck.adapters.contract import MicroBatch, Unused
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import require_equal, require_none, require_row_form, require_same_form
from fsdpcheck.checks._read import completed, recorded
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Diagnose
from fsdpcheck.oracle import Named
from fsdpcheck.oracle.bounds import UNIT_ROUNDOFF, gamma
from fsdpcheck.workload import batches, models
from fsdpcheck.workload.optimizer import CACHE_LINE, optimizer_for, project_

_AVERAGING = 3
"""Most roundings that averaging over an axis adds to a term: 1/W, the product before the sum, a division after it."""
_SMALLEST = {"float64": Fraction(1, 2**1074), "float32": Fraction(1, 2**149)}
"""The smallest positive number, by dtype."""


def assert_gradients_sum(execution: Execution, unused: Unused = "none") -> None:
    """The gradient of every step is the average of the ranks' own gradients, within the theorem on rounded sums; of who
    does not average their sum.

    ``unused``: what a parameter has that no sample of a step depends on (ArithmeticRule.unused).

    Own gradients are replayed from the parameters recorded before the step; in a private step each sample is weighed by
    the clip factor its rank reported (observe "factors").
    """
    request = execution.request
    completed(execution)
    for k in range(request.training.step.steps):
        terms = _terms(execution, k)
        without = without_gradient(execution, k, terms, unused)
        for rank, got in recorded(execution, k, "grads"):
            cause = functools.partial(_of_gradient, execution, k, got)
            _require_sum(request, got, terms, without, f"step {k}, rank {rank}", cause)


def assert_updates_follow(execution: Execution) -> None:
    """After every step, parameters are the optimizer's update of the recorded ones by the recorded gradients.

    Bit for bit: the optimizer is elementwise. Its state (momentum, moments, schedule) is followed over all steps.
    """
    case = execution.request.training
    what = "the update is not the optimizer's for the gradient that was shown"
    for result in completed(execution):
        parameters = {name: nn.Parameter(value.clone()) for name, value in result.initial.items()}
        optimizer = optimizer_for(case, {name: parameters[name] for name in trained_names(case)})
        for k, record in enumerate(result.steps):
            before = {name: value.detach().clone() for name, value in parameters.items()}
            _take_gradients(parameters, execution, result, k)
            optimizer.step()
            wanted = {name: value.detach() for name, value in parameters.items()}
            trained = {name: wanted[name] for name in trained_names(case)}
            cause = functools.partial(_of_update, case, before, trained, record.params)
            require_equal(what, record.params, wanted, f"step {k}, rank {result.rank}", cause)
            if case.arithmetic.project:
                project_(parameters.values(), case)


def _take_gradients(parameters: Mapping[str, nn.Parameter], execution: Execution, result: RankResult, k: int) -> None:
    """Give parameters the gradients that a rank showed at step ``k``, and None to those that the step does not use.

    Raises unless there is one of each trained parameter that it uses. Whether unused ones have one is for
    ``assert_gradients_sum`` to say.
    """
    trained, shown = trained_names(execution.request.training), result.steps[k].grads
    if shown is None:
        raise UsageError(f"the run recorded no grads (rank {result.rank}, step {k}); next: observe 'grads'")
    missing = {*trained} - shown.keys()
    needed = {*trained} - missing if missing and not missing & _reached(execution, k) else {*trained}
    what = "the gradient that was shown is not of every trained parameter"
    wanted = {name: parameters[name].detach() for name in trained if name in needed}
    require_same_form(what, shown, wanted, f"step {k}, rank {result.rank}")
    for name in trained:
        parameters[name].grad = shown[name].clone() if name in shown else None


def _of_update(case: TrainingCase, before: Named, after: Named, got: Named) -> Causes | None:
    return list(diagnosis.stood_still(case, before, after, got)) or None


def local_gradient(
    case: TrainingCase, before: Mapping[str, Tensor], micro: MicroBatch, weights: Tensor, placement: Mapping[str, int]
) -> Named:
    """One rank's gradient of sum_i weights_i L_i on one micro-batch, before any reduction; ``weights`` [b].

    Parameters that are not reached get zeros. See ``local_losses``.
    """
    losses, trained = local_losses(case, before, micro, placement)
    found = torch.autograd.grad(
        losses, list(trained.values()), weights.to(losses.dtype), allow_unused=True, materialize_grads=True
    )
    return dict(zip(trained, found, strict=True))


def local_losses(
    case: TrainingCase, before: Mapping[str, Tensor], micro: MicroBatch, placement: Mapping[str, int]
) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """(losses [b] of one micro-batch, with their graph; the trained parameters that they depend on).

    ``before``: full parameters by canonical name, in the case's dtype. ``placement``: their addresses modulo a cache
    line, 0 where not said.
    """
    model = _model(case)
    for name, parameter in model.named_parameters():
        parameter.data = _placed(before[name], placement.get(name, 0))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return models.loss_for(case)(model(micro.inputs), micro.targets), trained


def sum_bound(case: TrainingCase, averages: bool = True) -> Fraction:
    """Relative to sum |terms|: how far a rounded average of the W * K terms may be from the exact one, or their sum.

    Dividing by a power of two is exact, so then only the additions count. Averages may be averaged again with the next
    micro-batch's: then each of the K reductions adds W - 1 sums of equal numbers, and its averaging.
    """
    terms = case.world_size * case.step.micro_batches
    axes = 2 if case.mesh.dp_replicate > 1 else 1
    exact = not averages or case.world_size & (case.world_size - 1) == 0
    averaging = 0 if exact else axes * _AVERAGING * case.step.reductions
    return gamma(terms - 1 + averaging, UNIT_ROUNDOFF[case.arithmetic.dtype])


def underflow_bound(case: TrainingCase) -> Fraction:
    """How far off averaging may be where quotients fall below the normal numbers: half a step of theirs a division.

    There also a division by a power of two rounds, and relative bounds say nothing; sums of such numbers are exact.
    """
    divisions = 2 * case.world_size * case.step.micro_batches * _AVERAGING
    return divisions * _SMALLEST[case.arithmetic.dtype] / 2


def _placed(value: Tensor, address: int) -> Tensor:
    """A copy of ``value`` whose address is ``address`` modulo a cache line."""
    buffer = torch.empty(value.numel() + CACHE_LINE // value.element_size(), dtype=value.dtype)
    start = (address - buffer.data_ptr()) % CACHE_LINE // value.element_size()
    return buffer[start : start + value.numel()].view(value.shape).copy_(value)


@functools.lru_cache(maxsize=4)
def _model(case: TrainingCase) -> models.CaseModel:
    return models.build(case)


def trained_names(case: TrainingCase) -> list[str]:
    return [name for name, parameter in _model(case).named_parameters() if parameter.requires_grad]


def _terms(execution: Execution, k: int) -> list[Named]:
    """Every rank's gradient of every micro-batch of one step."""
    return [term for result in execution.ranks for term in _of_rank(execution, result, k)]


def _of_gradient(execution: Execution, k: int, got: Mapping[str, Tensor]) -> Causes | None:
    """Causes of a gradient that is not the average of the ranks' own."""
    terms = [_to_average(execution, _of_rank(execution, result, k)) for result in execution.ranks]
    return diagnosis.of_terms(execution.request.training, got, terms, _reweighed(execution, k))


def _to_average(execution: Execution, terms: list[Named]) -> list[Named]:
    """Of who only adds terms up, what would be averaged: W times each. To find causes by, not to judge."""
    if execution.request.averages:
        return terms
    world = execution.request.training.world_size
    return [{name: value.double() * world for name, value in term.items()} for term in terms]


def _reweighed(execution: Execution, k: int) -> Iterator[tuple[Cause, Named]]:
    """(cause, gradient) with the first sample of each micro-batch left out or counted twice."""
    world = execution.request.training.world_size
    for said, times in (("left out", 0.0), ("counted twice", 2.0)):
        ranks = [_of_rank(execution, result, k, times) for result in execution.ranks]
        mine = [term for own in ranks for term in _to_average(execution, own)]
        sums = {name: torch.stack([term[name].double() for term in mine]).sum(0) / world for name in mine[0]}
        yield Cause(f"first {said}", f"the first sample of each micro-batch is {said}"), sums


def _of_rank(execution: Execution, result: RankResult, k: int, first: float = 1.0) -> list[Named]:
    """One rank's gradients by micro-batch, from the parameters it showed before the step.

    ``first``: what the weight of the first sample of each micro-batch is multiplied by, to try a cause.
    """
    case, record = execution.request.training, result.steps[k]
    before = parameters_before(result, k, case)
    request = execution.request
    batch = batches.batch(case, k, result.rank, request.instrument, averages=request.averages)
    factors = _factors(record, batch.size, case, f"step {k}, rank {result.rank}")
    found, start = [], 0
    for micro in batch.micro_batches:
        count = len(micro.indices)
        scale = 1 / max(count, 1) if case.step.reduction == "mean" else batch.loss_scale
        weights = torch.full((count,), scale, dtype=models.DTYPES[case.arithmetic.dtype])
        if case.step.private:
            weights = factors[start : start + count] * weights
        weights[:1] *= first
        found.append(local_gradient(case, before, micro, weights, result.placement))
        start += count
    return found


def _factors(record: StepRecord, size: int, case: TrainingCase, where: str) -> Tensor:
    """The factors a rank reported, one a local sample; ones in a step that does not clip."""
    wanted = torch.ones(size, dtype=models.DTYPES[case.arithmetic.dtype])
    if not case.step.private:
        return wanted
    if record.factors is None:
        raise UsageError("the run recorded no factors; next: observe 'factors'")
    what = "clip factors are wrong"
    require_row_form(what, record.factors, wanted, where)
    return record.factors


def parameters_before(result: RankResult, k: int, case: TrainingCase) -> Named:
    """Parameters by canonical name that a rank began step k with: those it showed last, projected if it projects."""
    shown = result.initial if k == 0 else result.steps[k - 1].params
    if k == 0 or not case.arithmetic.project:
        return shown
    copies = {name: value.clone() for name, value in shown.items()}
    project_(copies.values(), case)
    return copies


def without_gradient(execution: Execution, k: int, terms: Sequence[Named], rule: Unused) -> set[str]:
    """Names of the parameters without a gradient at step ``k``: looked for where one's ``terms`` are all zero."""
    case = execution.request.training
    if not terms or all(any(bool(term[name].any()) for term in terms) for name in terms[0]):
        return set()
    return oracle.without_gradient(case, rule, trained_names(case), _reached(execution, k))


def _reached(execution: Execution, k: int) -> set[str]:
    """Names of the parameters that a loss of step ``k`` depends on, on any rank."""
    case, reached = execution.request.training, set[str]()
    for result in execution.ranks:
        before = parameters_before(result, k, case)
        for micro in batches.batch(case, k, result.rank).micro_batches:
            losses, trained = local_losses(case, before, micro, result.placement)
            found = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
            reached |= {name for name, gradient in zip(trained, found, strict=True) if gradient is not None}
    return reached


def _require_sum(
    request: RunRequest,
    got: Mapping[str, Tensor],
    terms: Sequence[Named],
    without: set[str],
    where: str,
    cause: Diagnose,
) -> None:
    case, averages = request.training, request.averages
    divisor = case.world_size if averages else 1
    what = f"the gradient is not the {'average' if averages else 'sum'} of the ranks' own gradients"
    names = [name for name in terms[0] if name not in without]
    wanted = {name: _rounded_average([term[name] for term in terms], divisor) for name in names}
    require_same_form(what, got, wanted, where)
    bound = sum_bound(case, averages)
    wrong = {}
    for name, value in wanted.items():
        mask = _beyond(got[name], value, [term[name] for term in terms], divisor, bound, underflow_bound(case))
        if bool(mask.any()):
            wrong[name] = mask
    require_none(what, got, wanted, wrong, where, cause)


def _rounded_average(terms: Sequence[Tensor], divisor: int) -> Tensor:
    """Elementwise sum / divisor, rounded once or twice, in the terms' dtype."""
    rows = torch.stack([term.double().flatten() for term in terms], dim=1).tolist()
    sums = [math.fsum(row) / divisor for row in rows]
    return torch.tensor(sums, dtype=torch.float64).reshape(terms[0].shape).to(terms[0].dtype)


def _beyond(
    got: Tensor, near: Tensor, terms: Sequence[Tensor], divisor: int, bound: Fraction, least: Fraction
) -> Tensor:
    """Mask of the elements of ``got`` farther than bound * sum |terms| + ``least`` from the exact average."""
    mask = torch.zeros_like(got, dtype=torch.bool)
    for place in (got != near).nonzero().tolist():
        index = tuple(place)
        values = [Fraction(float(term[index])) for term in terms]
        room = bound * sum(map(abs, values), Fraction(0)) / divisor + least
        value = float(got[index])
        mask[index] = not math.isfinite(value) or abs(Fraction(value) - sum(values, Fraction(0)) / divisor) > room
    return mask
