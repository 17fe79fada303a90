"""Checks of norms, factors and clipped gradients, exported by checks.

They compare bits where the data are exact, and within a proven bound where an implementation may round (see
oracle/bounds.py).

Legend: n samples of a step, b on one rank, R rows of the instrument, W ranks, N the normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

from fsdpcheck import diagnosis, oracle
from fsdpcheck.adapters.contract import GlobalNormRule
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks import square_roots
from fsdpcheck.checks._compare import (
    alike,
    number,
    require_equal,
    require_no_row,
    require_none,
    require_row_form,
    require_same_form,
    unknown,
)
from fsdpcheck.checks._compare import differing as bits_differ
from fsdpcheck.checks._read import completed, local_rows, local_samples, pick, poisoned, recorded, shows
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, StepRecord
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.oracle import INSTRUMENT, Answer, Named, StepAnswer, bounds
from fsdpcheck.workload import clip_groups, models
from fsdpcheck.workload.clip_groups import column
from fsdpcheck.workload.optimizer import optimizer_for, project_


def assert_norms_exact(execution: Execution, answer: Answer) -> None:
    """Every rank's per-sample norms are the roots of the exact squared norms, bit for bit, by either root
    (checks/square_roots.py).

    Under a nested rule: within its proven bound of them. Steps are compared as long as they start from the answer's
    parameters.
    """
    bound, rooms = bounds.sample_norm_bound(answer), _scaling_rooms(answer)

    def wrong(step: StepAnswer, row: int, got: float) -> bool:
        squared, room = Fraction(float(step.squared_norms[row])), rooms[id(step)][row]
        return not _near_root(got, squared, bound) and not _near_by(got, bounds.square_root(squared), bound, room)

    _assert_rows(execution, answer, "norms", wrong if bound else None)


def assert_factors(execution: Execution, answer: Answer) -> None:
    """Every rank's clip factors are the rule's elementwise map of the exact norms, bit for bit.

    Under a nested rule: within the bound that follows from that of the norms.
    """
    bound, rooms = bounds.factor_bound(answer), _scaling_rooms(answer)

    def wrong(step: StepAnswer, row: int, got: float) -> bool:
        room = rooms[id(step)][row]
        further = bounds.factor_room(answer, step, row, room) if room else Fraction(0)
        return not _near_by(got, bounds.exact_factor(answer, step, row), bound, further)

    _assert_rows(execution, answer, "factors", wrong if bound else None)


def assert_probe_coefficients(execution: Execution, answer: Answer, contracted: bool = False) -> None:
    """The released gradient of the instrument *is* the factors: row i holds c_i * multiplicity * scale / N.

    Only for "probe" cases. Read from the gradients if recorded, else from the update of SGD without momentum. Bit for
    bit where scaling and averaging by W are exact and the model computes in its parameters' precision, otherwise within
    the few roundings they may make; ``contracted`` gradients round nothing to what the model computes in. Black box.
    """
    if answer.case.step.clipping != "probe":
        raise UsageError(f'got clipping {answer.case.step.clipping!r}; wanted "probe": only it has a row a sample')
    what = "the coefficients that the instrument reads are not the clip factors"
    for k, step in comparable(execution, answer):
        rows = [_probe_rows(answer, k, step, group, contracted) for group in range(len(answer.clip_norms))]
        names = clip_groups.instruments(answer.case)
        wanted = {name: value for name, (value, _) in zip(names, rows, strict=True)}
        room = {name: value for name, (_, value) in zip(names, rows, strict=True)}
        _assert_near(execution, answer, k, wanted, room, what)


def assert_clipped_gradient_within_bound(execution: Execution, answer: Answer) -> None:
    """|released gradient - sum_i c_i g_i / N| stays within the bound on rounding in the weighted backward pass.

    c_i are the implementation's own factors if recorded, else what the probe reads, else the right ones with their
    bound. For implementations whose factors round; where they do not, assert_parameters_equal asks for more. Read from
    the gradients if recorded, else from the update of SGD without momentum.
    """
    what = "the clipped gradient is not the sum of clipped per-sample gradients"
    for k, step in comparable(execution, answer):
        weights, relative = _weights(execution, answer, k, step)
        own = {name: column(weights, clip_groups.number(answer.case, name)) for name in step.gradients}
        wanted = {name: torch.tensordot(own[name], g, dims=1) for name, g in step.gradients.items()}
        room = bounds.clipped_gradient_bound(answer, step, weights, relative)
        _assert_near(execution, answer, k, wanted, room, what)


def assert_global_norm(execution: Execution, answer: Answer, rule: GlobalNormRule | None = None) -> None:
    """The global gradient norm every rank returned is ``rule``'s of the released gradient, within its bound."""
    rule = rule or GlobalNormRule()
    for k, step in comparable(execution, answer):
        bound = bounds.global_norm_bound(answer, step, rule)
        squared = bounds.exact_global_norm_squared(step)
        right = number(step.grad_norm if not rule.norm.eps else float(bounds.norm_of(squared, rule.norm)))
        norms = [*recorded(execution, k, "grad_norm")]
        returned = [float(norm) for _, norm in norms]
        for rank, norm in norms:
            got = float(norm)
            if not _near_norm(got, squared, bound, rule):
                raise Violation(
                    "the global gradient norm is wrong",
                    got=number(got),
                    wanted=f"{right} within a factor 1 +- {float(bound):.3g}",
                    where=f"step {k}, rank {rank}",
                    cause=poisoned(
                        execution, {"": norm}, partial(diagnosis.of_grad_norm, answer, k, rank, got, returned)
                    ),
                )


def assert_clipped_update(execution: Execution, answer: Answer, rule: GlobalNormRule | None = None) -> None:
    """Clipping by the global norm: the update is the optimizer's for gradient * min(1, C / (returned norm + eps)).

    Bit for bit, with the norm each rank itself returned, so that the norm's own rounding does not matter.
    """
    rule = rule or GlobalNormRule()
    for result in completed(execution):
        known = answer.steps[0].before if answer.case.step.thaws else answer.trainable
        parameters = {name: nn.Parameter(answer.steps[0].before[name].clone()) for name in known}
        optimizer = optimizer_for(answer.case, parameters)
        for k, step in comparable(execution, answer):
            record = result.steps[k]
            clipped = _globally_clipped(answer, step, record, rule)
            for name, parameter in parameters.items():
                parameter.grad = clipped.get(name)
            optimizer.step()
            wanted = {name: parameters[name].detach() if name in parameters else v for name, v in step.before.items()}
            where = f"step {k}, rank {result.rank}"
            what = "the update is not that of the gradient clipped by the returned norm"
            returned = math.nan if record.grad_norm is None else float(record.grad_norm)
            others = [float(norm) for rank, norm in recorded(execution, k, "grad_norm") if rank != result.rank]
            cause = partial(diagnosis.of_clipped_update, answer, k, record.params, returned, rule.eps, others)
            require_equal(what, record.params, wanted, where, poisoned(execution, record.params, cause))
            if answer.case.arithmetic.project:
                project_(parameters.values(), answer.case)


def _globally_clipped(answer: Answer, step: StepAnswer, record: StepRecord, rule: GlobalNormRule) -> Named:
    """The released gradient times the coefficient torch computes from the returned norm, in the norm's dtype."""
    if answer.case.step.max_grad_norm is None:
        raise UsageError("the case does not clip the global norm; next: draw cases with max_grad_norm")
    if record.grad_norm is None:
        raise UsageError("the run recorded no grad_norm; next: observe 'grad_norm'")
    dtype = models.DTYPES[rule.of(answer.case.arithmetic.dtype)]
    factor = oracle.global_factor(record.grad_norm.to(dtype), answer.case.step.max_grad_norm, rule.eps)
    return {name: value * factor.to(value.dtype) for name, value in step.released.items() if name in step.used}


def _assert_rows(
    execution: Execution,
    answer: Answer,
    field: str,
    wrong: Callable[[StepAnswer, int, float], bool] | None,
) -> None:
    """Compare "norms" or "factors" of all ranks and steps: by bits, or by ``wrong(step, row, got)``."""
    what = "per-sample gradient norms are wrong" if field == "norms" else "clip factors are wrong"
    diagnose = diagnosis.of_norms if field == "norms" else diagnosis.of_factors
    for k, step in comparable(execution, answer):
        for rank, got in recorded(execution, k, "norms" if field == "norms" else "factors"):
            rows = local_rows(answer.case, k, rank, step.samples)
            wanted = (
                square_roots.norms(answer, step, rows, got)
                if field == "norms"
                else square_roots.factors(answer, step, rows, got)
            )
            where = f"step {k}, rank {rank}"
            require_row_form(what, got, wanted, where)
            mask = bits_differ(got, wanted)
            if mask.dim() == 2:  # [b, G]
                got, wanted, mask = _worst(got, wanted, mask)
            elif wrong is not None:
                marks = [wrong(step, row, value) for row, value in zip(rows, got.tolist(), strict=True)]
                mask = torch.tensor(marks, dtype=torch.bool)
            cause = _silent_by_group(answer, partial(diagnose, answer, k, rank, got))
            require_no_row(what, got, wanted, mask, local_samples(answer.case, k, rank), where, cause)


def clips_by_group(answer: Answer) -> bool:
    """Whether factors are [n, G]."""
    return len(answer.clip_norms) > 1


def _silent_by_group(answer: Answer, cause: Diagnose) -> Diagnose:
    """``cause``, but unknown with per-layer clipping: of reported factors diagnosis knows one a sample only."""
    return unknown if clips_by_group(answer) else cause


def _worst(got: Tensor, wanted: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sample the first group that is marked: (got, wanted, mask), [b] each, of [b, G]."""
    group_b1 = mask.int().argmax(1, keepdim=True)
    return got.gather(1, group_b1)[:, 0], wanted.gather(1, group_b1)[:, 0], mask.any(1)


def comparable(execution: Execution, answer: Answer) -> Iterator[tuple[int, StepAnswer]]:
    """(number, answer) of the steps that all ranks began with the answer's parameters, up to the first they did not.

    An implementation that may round within a bound can leave the answer's path after a step that was right.
    """
    ranks = completed(execution)
    for k, step in enumerate(answer.steps):
        if k > 0:
            shown = [{name: v.clone() for name, v in result.steps[k - 1].params.items()} for result in ranks]
            if answer.case.arithmetic.project:
                for parameters in shown:
                    project_(parameters.values(), answer.case)
            if not all(alike(own.get(name), value) for own in shown for name, value in step.before.items()):
                return
        yield k, step


def _near_root(got: float, squared: Fraction, bound: Fraction) -> bool:
    """Whether got lies within a relative ``bound`` of the root of ``squared``; decided exactly."""
    if not math.isfinite(got) or got < 0:
        return False
    return max(1 - bound, Fraction(0)) ** 2 * squared <= Fraction(got) ** 2 <= (1 + bound) ** 2 * squared


def _near_by(got: float, exact: Fraction, bound: Fraction, room: Fraction) -> bool:
    """Whether got lies within a relative ``bound`` of what is itself within ``room`` of ``exact``."""
    return math.isfinite(got) and abs(Fraction(got) - exact) <= bound * (exact + room) + room


def _scaling_rooms(answer: Answer) -> dict[int, list[Fraction]]:
    """By the id of each step; see bounds.scaling_rooms."""
    return {id(step): bounds.scaling_rooms(answer, step) for step in answer.steps}


def _near_norm(got: float, squared: Fraction, bound: Fraction, rule: GlobalNormRule) -> bool:
    """Whether got lies within a relative ``bound`` of the rule's norm of ``squared``; decided exactly without an eps,
    and to 200 bits with one."""
    if not rule.norm.eps:
        return _near_root(got, squared, bound)
    norm = bounds.norm_of(squared, rule.norm)
    return math.isfinite(got) and abs(Fraction(got) - norm) <= bound * norm


def _probe_rows(
    answer: Answer, k: int, step: StepAnswer, group: int, contracted: bool = False
) -> tuple[Tensor, Tensor]:
    """Wanted gradient of a group's instrument and how far off it may be, [R, 1] float64."""
    case = answer.case
    wanted = torch.zeros(models.instrument_rows(case), 1, dtype=torch.float64)
    room, other = torch.zeros_like(wanted), column(square_roots.other_factors(answer, step), group)
    scaled = bounds.scaled_factor_bound(answer, step)
    for row, (sample, count) in enumerate(zip(step.samples, step.multiplicity, strict=True)):
        shown = Fraction(float(column(step.factors, group)[row]))
        exact = bounds.exact_factor(answer, step, row, group) if answer.rule.nested else shown
        weight = Fraction(models.loss_scale(case)) * count / Fraction(case.step.normaliser)
        apart, exact = abs(Fraction(float(other[row])) - shown) * weight, exact * weight
        relative = bounds.factor_bound(answer) + bounds.probe_bound(case, count, contracted)
        relative += scaled * (1 + relative)
        place = sample - k * case.layout.batch_size
        wanted[place, 0] = float(exact)
        error = relative * (exact + apart) + apart + abs(Fraction(float(wanted[place, 0])) - exact)
        room[place, 0] = math.nextafter(float(error), math.inf) if error else 0.0
    return wanted, room


def _weights(execution: Execution, answer: Answer, k: int, step: StepAnswer) -> tuple[Tensor, Fraction]:
    """(weights [n] = factor * multiplicity / N as the implementation has them, their relative error).

    With per-layer clipping [n, G].
    """
    if clips_by_group(answer):
        groups = range(len(answer.clip_norms))
        return torch.stack([_right_weights(answer, step, g) for g in groups], 1), bounds.weight_bound(answer)
    case, count = answer.case, len(step.samples)
    if shows(execution, k, "factors"):
        weights = torch.zeros(count, dtype=torch.float64)
        for rank, factors in recorded(execution, k, "factors"):
            rows = local_rows(case, k, rank, step.samples)
            require_row_form("clip factors are wrong", factors, pick(step.factors, rows), f"step {k}, rank {rank}")
            weights.index_add_(0, torch.tensor(rows, dtype=torch.int64), factors.double())
        return weights / (case.copies * case.step.normaliser), Fraction(0)
    if case.step.clipping == "probe" and shows(execution, k, "grads"):
        rows_R = next(iter(recorded(execution, k, "grads")))[1][INSTRUMENT].double().flatten()
        places = [sample - k * case.layout.batch_size for sample in step.samples]
        most = max((bounds.probe_bound(case, m) for m in step.multiplicity), default=Fraction(0))
        return rows_R[places] / models.loss_scale(case), most
    scaled, bound = bounds.scaled_factor_bound(answer, step), bounds.weight_bound(answer)
    return _right_weights(answer, step, 0), bound + scaled * (1 + bound)


def _right_weights(answer: Answer, step: StepAnswer, group: int) -> Tensor:
    """[n]: factor * multiplicity / N of one clipping group."""
    counts = torch.tensor(step.multiplicity, dtype=torch.float64)
    exact = [float(bounds.exact_factor(answer, step, row, group)) for row in range(len(step.samples))]
    return torch.tensor(exact, dtype=torch.float64) * counts / answer.case.step.normaliser


def _assert_near(execution: Execution, answer: Answer, k: int, wanted: Named, room: Named, what: str) -> None:
    """|gradient - wanted| <= room elementwise on every rank, float64; from gradients, else from the SGD update."""
    seen = shows(execution, k, "grads")
    for result in execution.ranks:
        where = f"step {k}, rank {result.rank}"
        record = result.steps[k]
        if seen and record.grads is not None:
            _within(answer, k, record.grads, wanted, room, what, where)
        else:
            _update_within(answer, k, record.params, wanted, room, what, where)


def _within(
    answer: Answer, k: int, grads: Mapping[str, Tensor], wanted: Named, room: Named, what: str, where: str
) -> None:
    require_same_form(what, grads, answer.steps[k].used, where)
    wrong = {}
    for name in grads.keys() & wanted.keys():
        mask = ~((grads[name].double() - wanted[name]).abs() <= room[name])
        if bool(mask.any()):
            wrong[name] = mask
    require_none(what, grads, wanted, wrong, where, partial(diagnosis.of_gradient, answer, k, grads))


def _update_within(
    answer: Answer, k: int, params: Mapping[str, Tensor], wanted: Named, room: Named, what: str, where: str
) -> None:
    """The same read from parameters: SGD's update falls as the gradient grows, in floating point too.

    So parameters must lie between the updates of both ends of the gradient's interval, with no allowance of their own.
    """
    case, step = answer.case, answer.steps[k]
    if not _reads_gradients_from_updates(case, k):
        raise UsageError("gradients cannot be read from these updates; next: observe 'grads', or draw SGD")
    require_same_form(what, params, step.after, where)
    low = oracle.update(case, step.before, _outward(step.used, wanted, room, math.inf), k)
    high = oracle.update(case, step.before, _outward(step.used, wanted, room, -math.inf), k)
    wrong = {}
    for name in wanted:
        mask = ~((low[name] <= params[name]) & (params[name] <= high[name]))
        if bool(mask.any()):
            wrong[name] = mask
    require_none(what, params, step.after, wrong, where, partial(diagnosis.of_update, answer, k, params))


def _reads_gradients_from_updates(case: TrainingCase, k: int) -> bool:
    """Whether the update is a decreasing function of this step's gradient alone: SGD, without momentum after step 0."""
    return case.step.optimizer.kind == "sgd" and (k == 0 or case.step.optimizer.momentum == 0)


def _outward(used: Named, wanted: Named, room: Named, direction: float) -> Named:
    """wanted + room (or - room), rounded outward in the case's dtype; other gradients as they are."""
    moved = dict(used)
    for name in used.keys() & wanted.keys():
        value = wanted[name]
        sign = math.copysign(1.0, direction)
        end = (value + sign * room[name]).to(used[name].dtype)
        further = torch.nextafter(end, torch.full_like(end, direction))
        moved[name] = torch.where(room[name] == 0, end, further)
    return moved
