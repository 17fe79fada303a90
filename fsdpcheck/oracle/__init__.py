"""The slow, obviously right answer to a case: one sample at a time, plain autograd, no sharding, no ghost trick.

Sums are taken in float64; oracle/certificate.py proves for each case that they are exact, so that no order of summation
could have given other bits. Elementwise stages (norm, clip factor, optimizer) are computed in the case's dtype, with
the expression the implementation under test declares, because only equal expressions give equal bits.

Legend: B samples of a logical batch, n distinct ones among them, D of the dataset, R rows of the instrument, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.contract import ArithmeticRule, FactorRule, NormRule, Unused
from fsdpcheck.case import TrainingCase, prng
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.four_squares import four_squares, slack_targets
from fsdpcheck.exact.grid import exact_square_sum, grid_exponent
from fsdpcheck.workload import batches, clip_groups, models
from fsdpcheck.workload import numerics as arithmetic
from fsdpcheck.workload.clip_groups import INSTRUMENT as INSTRUMENT
from fsdpcheck.workload.clip_groups import column, members
from fsdpcheck.workload.optimizer import optimizer_for, project_

Named = dict[str, Tensor]
"""Tensors by canonical parameter name; a shared parameter once, under its first name."""


@dataclass(frozen=True)
class StepAnswer:
    """What one step of the single device does. Gradients, norms and losses carry the case's loss scale.

    ``samples``: the n distinct samples of the logical batch, ascending; ``multiplicity`` how often each is in it.
    All per-sample fields have n rows in that order. float64 unless said otherwise; frozen parameters have no gradient.
    """

    before: Named
    """Parameters at the start of the step, case dtype."""
    samples: tuple[int, ...]
    multiplicity: tuple[int, ...]
    losses: Tensor
    gradients: Named
    """Per-sample gradients, [n, *shape]."""
    squared_norms: Tensor
    group_squares: Tensor
    """Squared norms by clipping group, [n, G]."""
    targets: Tensor
    """Targets u of the instruments, [n, G * R]."""
    norms: Tensor
    """Norms of squared_norms by the rule of norms, case dtype."""
    factors: Tensor
    """Clip factors, case dtype; ones in plain training. [n], or [n, G] with per-layer clipping."""
    clipped_sum: Named
    """Sum over the logical batch of factor * gradient."""
    released: Named
    """clipped_sum / N: the released gradient, case dtype."""
    grad_norm: Tensor
    """Norm of the released gradient over all parameters, 0-dim, case dtype: one root of the one exact square sum."""
    used: Named
    """What the optimizer was given: ``released``, scaled to ``max_grad_norm`` if the case has one; case dtype.

    Without the parameters whose gradient is None: those that no sample of the step depends on, unless the rule says
    that they get zeros (``ArithmeticRule.unused``)."""
    after: Named
    """Parameters after the optimizer's update and *before* any projection, case dtype: what the laws compare."""
    outputs: Tensor
    """The model's outputs with the parameters ``before``, [n, F + G * R]."""
    reached: frozenset[str] = frozenset()
    """Names of the trained parameters that the loss of some sample depends on."""


@dataclass(frozen=True)
class Answer:
    """The single device's answer. ``clip_norm`` is C in the units of the losses (infinite in plain training).

    ``instrument`` [steps, D, G * R], float64: targets of the instruments for RunRequest.instrument.
    """

    case: TrainingCase
    rule: FactorRule
    clip_norm: float
    instrument: Tensor
    steps: tuple[StepAnswer, ...]
    arithmetic: ArithmeticRule = field(default_factory=ArithmeticRule)

    @property
    def leaves_unused(self) -> bool:
        """Whether a step with samples has a trained parameter that none of them depends on."""
        return any(step.samples and step.gradients.keys() > step.reached for step in self.steps)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Canonical names of the parameters that are trained, whether a step depends on them or not."""
        return tuple(self.steps[0].gradients)

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """C of each clipping group."""
        return tuple(clip_groups.bounds(self.case, self.clip_norm).values())


def answer(
    case: TrainingCase,
    rule: FactorRule | None = None,
    conventions: ArithmeticRule | None = None,
    forced: Answer | None = None,
) -> Answer:
    """The single device's answer to ``case`` under ``rule``, the expression of the clip factors (default: C / norm).

    ``conventions``: what a parameter that a step does not use has for a gradient (default: None, as in PyTorch).
    It is the exact answer if ``proof.prove(case, answer)`` returns. In the "unclipped" family C is the power of two
    above twice every norm of every step. ``forced``: the answer to another case of the same model and optimizer, whose
    gradients the optimizer is given at each step in place of this case's own.
    """
    rule, conventions = rule or FactorRule(), conventions or ArithmeticRule()
    device = _SingleDevice(case, rule, conventions, forced)
    with arithmetic.decided(case):
        steps = tuple(device.step(k) for k in range(case.step.steps))
    rows_KDR = torch.zeros(case.step.steps, len(device.inputs), models.instrument_width(case), dtype=torch.float64)
    for k, step in enumerate(steps):
        rows_KDR[k, list(step.samples)] = step.targets
    return Answer(case, rule, _clip_norm(case, steps), rows_KDR, steps, conventions)


def norms(squared: Tensor, rule: NormRule, root: Callable[[Tensor], Tensor] = torch.sqrt) -> Tensor:
    """Norms of squared norms, elementwise in their dtype, by the rule's own expression."""
    inside, outside = (rule.eps if rule.place == place else 0.0 for place in ("inside", "outside"))
    found = root(squared + inside if inside else squared)
    return found + outside if outside else found


def factors(norms: Tensor, clip_norm: float, rule: FactorRule) -> Tensor:
    """Clip factors min(1, C / (n + eps)) of norms [n], elementwise in their dtype, by the rule's own expression."""
    shifted = norms + rule.eps if rule.eps else norms
    if rule.expression == "reciprocal":
        return (shifted.reciprocal() * clip_norm).clamp(max=1.0)
    return torch.div(torch.full_like(shifted, clip_norm), shifted).clamp(max=1.0)


def global_factor(grad_norm: Tensor, max_grad_norm: float, eps: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by, given the norm it returned; 0-dim."""
    return torch.clamp(max_grad_norm / (grad_norm + eps), max=1.0)


def update(case: TrainingCase, before: Named, gradients: Named, step: int = 0) -> Named:
    """Parameters after one optimizer step with fresh state from ``before`` with ``gradients``, all case dtype.

    The learning rate is that of ``step``.
    """
    parameters = {name: nn.Parameter(before[name].clone()) for name in gradients}
    optimizer = optimizer_for(case, parameters, step)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()
    optimizer.step()
    return {name: parameters[name].detach() if name in parameters else value for name, value in before.items()}


class _SingleDevice:
    """The model, its optimizer and the data, stepping. ``model`` is in float64, ``parameters`` in the case's dtype."""

    def __init__(
        self, case: TrainingCase, rule: FactorRule, conventions: ArithmeticRule, forced: Answer | None = None
    ) -> None:
        self.case, self.rule, self.conventions, self.forced = case, rule, conventions, forced
        self.dtype = models.DTYPES[case.arithmetic.dtype]
        self.parameters = {name: nn.Parameter(value) for name, value in models.initial_parameters(case).items()}
        self.model = models.wide(case)
        self.trained = self._trained()
        self.frozen = self.parameters.keys() - self.trained.keys()
        self.instruments = clip_groups.instruments(case)
        self.loss = models.loss_for(case)
        self.inputs = batches.inputs(case)
        self.inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        self.targets = batches.targets(case).double()
        known = self.parameters if case.step.thaws else self.trained
        self.optimizer = optimizer_for(case, {name: self.parameters[name] for name in known})

    def _trained(self) -> dict[str, nn.Parameter]:
        """Those that are trained now, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _change_what_is_trained(self, again: bool) -> None:
        """Thaw everything; ``again``: but what was frozen at first, whose gradients go, as ``zero_grad`` lets them."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not again or name not in self.frozen)
            self.parameters[name].grad = None
        self.trained = self._trained()

    def step(self, k: int) -> StepAnswer:
        if k and self.case.step.thaws:
            self._change_what_is_trained(again=not self.case.thawed_in(k))
        self._load()
        batch = sorted(batches.logical_batch(self.case, k).items())
        samples = tuple(index for index, _ in batch)
        multiplicity = tuple(count for _, count in batch)
        losses, outputs, gradients, reached = self._per_sample(samples)
        targets_nR = _instrument_targets(self.case, k, samples, gradients)
        for name, own_nR in zip(
            self.instruments, torch.split(targets_nR, models.instrument_rows(self.case), 1), strict=True
        ):
            gradients[name] = (own_nR * self.loss.scale).unsqueeze(-1)
        squares_nG = self._group_squares(gradients, len(samples))
        squared = squares_nG.sum(1)
        of_samples = norms(squared.to(self.dtype), self.rule.norm)
        coefficients_nG = self._factors(norms(squares_nG.to(self.dtype), self.rule.norm))
        coefficients = coefficients_nG if len(self.instruments) > 1 else coefficients_nG[:, 0]
        times_n = torch.tensor(multiplicity, dtype=torch.float64)
        total = self._weighted(
            gradients, coefficients.double() * (times_n if coefficients.dim() == 1 else times_n[:, None])
        )
        released = {name: (value / self.case.step.normaliser).to(self.dtype) for name, value in total.items()}
        grad_norm = torch.tensor(_root_of_squares(released, k), dtype=self.dtype)
        unused = without_gradient(self.case, self.conventions.unused, self.trained, reached) if samples else set()
        used = self._clip_globally({name: value for name, value in released.items() if name not in unused}, grad_norm)
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        after = self._update(used if self.forced is None else self.forced.steps[k].used)
        return StepAnswer(
            before, samples, multiplicity, losses, gradients, squared, squares_nG, targets_nR, of_samples, coefficients,
            total, released, grad_norm, used, after, outputs, frozenset(reached),
        )  # fmt: skip

    def _load(self) -> None:
        """Give the float64 model the values of the parameters."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.parameters[name])

    def _per_sample(self, samples: tuple[int, ...]) -> tuple[Tensor, Tensor, Named, set[str]]:
        """(losses [n], outputs and gradients [n, *shape] of the samples, each alone, with the instrument's targets at
        zero; names of the parameters that one of the losses depends on)."""
        packed = torch.zeros(1, self.targets.shape[1] + models.instrument_width(self.case), dtype=torch.float64)
        losses, outputs, reached = [], [], set()
        gradients: dict[str, list[Tensor]] = {name: [] for name in self.trained}
        for index in samples:
            packed[0, : self.targets.shape[1]] = self.targets[index]
            output = self.model(self.inputs[index : index + 1])
            loss = self.loss(output, packed)[0]
            found = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
            losses.append(loss.detach())
            outputs.append(output.detach()[0])
            for (name, parameter), gradient in zip(self.trained.items(), found, strict=True):
                gradients[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
                reached |= {name} if gradient is not None or name in self.instruments else set()
        shapes = {name: p.shape for name, p in self.trained.items()}
        stacked = {
            name: torch.stack(rows) if rows else torch.zeros(0, *shapes[name], dtype=torch.float64)
            for name, rows in gradients.items()
        }
        nothing = torch.zeros(0, dtype=torch.float64)
        of_losses, of_outputs = (torch.stack(found) if found else nothing for found in (losses, outputs))
        return of_losses, of_outputs, stacked, reached

    def _group_squares(self, gradients: Named, count: int) -> Tensor:
        """[n, G]"""
        groups = range(len(self.instruments))
        return torch.stack([_square_sums(members(self.case, gradients, group), count) for group in groups], 1)

    def _factors(self, norms_nG: Tensor) -> Tensor:
        if self.case.step.clipping in ("none", "unclipped"):
            return torch.ones_like(norms_nG)
        bounds = clip_groups.bounds(self.case, self.case.step.clip_norm * self.loss.scale).values()
        return torch.stack([factors(n, c, self.rule) for n, c in zip(norms_nG.unbind(1), bounds, strict=True)], 1)

    def _weighted(self, gradients: Named, weights: Tensor) -> Named:
        """Sum over samples of weight * gradient, with weights [n], or [n, G] by group."""
        weight_of = {name: column(weights, clip_groups.number(self.case, name)) for name in gradients}
        return {name: torch.tensordot(weight_of[name], gradient, dims=1) for name, gradient in gradients.items()}

    def _clip_globally(self, released: Named, grad_norm: Tensor) -> Named:
        if self.case.step.max_grad_norm is None:
            return released
        factor = global_factor(grad_norm, self.case.step.max_grad_norm, 1e-6)
        return {name: value * factor for name, value in released.items()}

    def _update(self, gradients: Named) -> Named:
        for name in self.trained:
            self.parameters[name].grad = gradients[name].clone() if name in gradients else None
        self.optimizer.step()
        after = {name: p.detach().clone() for name, p in self.parameters.items()}
        if self.case.arithmetic.project:
            project_(self.parameters.values(), self.case)
        return after


def without_gradient(case: TrainingCase, rule: Unused, trained: Collection[str], reached: Collection[str]) -> set[str]:
    """Of the ``trained`` parameters those that are left without a gradient by ``rule``, if losses depend on those
    that are ``reached`` and on no others."""
    unused = {*trained} - {*reached}
    if rule == "zero" or (rule == "zero-if-private" and case.step.private):
        return set()
    if rule != "zero-in-used-unit" or not unused:
        return unused
    used_units = {models.unit_of(case, name) for name in reached}
    return {name for name in unused if models.unit_of(case, name) not in used_units}


def _root_of_squares(gradients: Named, k: int) -> float:
    """The Euclidean norm of all gradients of step ``k`` together. Raises NotExact where it is no finite number."""
    try:
        return math.sqrt(exact_square_sum(gradients.values()))
    except OverflowError:
        raise NotExact(f"step {k}, gradients: their norm is beyond float64") from None


def _square_sums(gradients: Named, count: int) -> Tensor:
    """Squared norm of each sample's gradient over all parameters, [n]."""
    total = torch.zeros(count, dtype=torch.float64)
    for gradient in gradients.values():
        total += gradient.reshape(count, -1).square().sum(1) if count else 0
    return total


def _clip_norm(case: TrainingCase, steps: Iterable[StepAnswer]) -> float:
    if case.step.clipping == "none":
        return math.inf
    if case.step.clipping != "unclipped":
        return case.step.clip_norm * models.loss_scale(case)
    largest = max((float(step.norms.max()) for step in steps if len(step.norms)), default=1.0)
    return 2.0 ** (math.frexp(max(largest, 1.0))[1] + 1)


def plain_targets(case: TrainingCase, k: int, samples: Iterable[int]) -> Tensor:
    """Targets u of the instrument for some samples of step ``k`` of plain training, [n, R] float64: each 1 or 2.

    The instrument is the last parameter that is trained. With a gradient of zero, whatever an implementation does wrong
    with its last parameter, or with the last of its buckets, would be done to one that cannot show it. Being positive,
    they never cancel. Zeros where nobody reduces the gauge beside a user's own model.
    """
    shape = (case.layout.batch_size, models.instrument_width(case))
    if case.model.own is not None and not case.model.own.gauge:
        return torch.zeros(len(list(samples)), shape[1], dtype=torch.float64)
    drawn = torch.from_numpy(prng.integers(case.seed, f"instrument {k}", shape, 1, 2)).double()
    return drawn[[index - k * case.layout.batch_size for index in samples]]


def plain_rows(case: TrainingCase) -> Tensor:
    """The same for RunRequest.instrument, of all steps and samples: [steps, D, R]."""
    size = case.layout.batch_size
    rows_KDR = torch.zeros(case.step.steps, size * case.step.steps, models.instrument_width(case), dtype=torch.float64)
    for k in range(case.step.steps):
        rows_KDR[k, k * size : (k + 1) * size] = plain_targets(case, k, range(k * size, (k + 1) * size))
    return rows_KDR


def _instrument_targets(case: TrainingCase, k: int, samples: tuple[int, ...], gradients: Named) -> Tensor:
    """Targets u of the instruments, [n, G * R]; of each: ``plain_targets`` ("none"), zeros ("unclipped"), one-hot by
    sample ("probe"), or slack ("exact")."""
    if case.step.clipping == "none":
        return plain_targets(case, k, samples)
    width, rows = models.instrument_width(case), models.instrument_rows(case)
    targets = torch.zeros(len(samples), width, dtype=torch.float64)
    for group, rows_nR in enumerate(torch.split(targets, rows, 1)):
        if case.step.clipping == "probe":
            for row, index in enumerate(samples):
                rows_nR[row, index - k * case.layout.batch_size] = 1.0
        elif case.step.clipping == "exact" and samples:
            _fill_slack(rows_nR, case, k, samples, members(case, gradients, group), group)
    return targets


def _fill_slack(
    rows_nR: Tensor, case: TrainingCase, k: int, samples: tuple[int, ...], gradients: Named, group: int
) -> None:
    """Four-square slack for the norm of each sample's ``gradients`` of one clipping group.

    The four values start at another row for each sample.
    """
    scale = models.loss_scale(case)
    body = {name: gradient / scale for name, gradient in gradients.items()}
    clip_norm = case.step.clip_norm * clip_groups.multiples(case)[group]
    fraction_bits = max(0, -min((grid_exponent(g) for g in body.values()), default=0))
    if fraction_bits > 26:
        raise NotExact(f"step {k}, slack: squares on the grid 2**-{2 * fraction_bits}; had 53 bits")
    unit = 4**fraction_bits
    squared = [int(value) for value in (_square_sums(body, len(samples)) * unit).tolist()]
    choices = prng.integers(
        case.seed, f"slack {k}" + f" group {group}" * bool(group), (case.layout.batch_size,), 0, 1 << 16
    )
    picked = [int(choices[index - k * case.layout.batch_size]) for index in samples]
    for row, target in enumerate(slack_targets(squared, clip_norm**2 * unit, unit, picked)):
        if target is not None:
            if target.bit_length() > 53:
                raise NotExact(f"step {k}, slack: sample {samples[row]} needs {target.bit_length()} bits; had 53")
            for place, value in enumerate(four_squares(target - squared[row])):
                rows_nR[row, (samples[row] + place) % rows_nR.shape[1]] = value / 2**fraction_bits
