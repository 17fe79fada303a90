"""Checks of noise: seen as what a noisy step releases beyond the same step without noise.

Legend: N the normaliser, C the clip norm, s the noise multiplier, n draws, W ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fsdpcheck import diagnosis
from fsdpcheck.case import Arithmetic, BatchLayout, Case, LayerSpec, MeshSpec, ModelSpec, StepSpec
from fsdpcheck.checks.comparing import alike, first_index, number, require_same_form
from fsdpcheck.checks.draws import used_twice
from fsdpcheck.checks.matched import trained_names
from fsdpcheck.checks.recorded import completed, recorded
from fsdpcheck.diagnosis.noise import Draw
from fsdpcheck.errors import Diagnose, UsageError, Violation
from fsdpcheck.execution import Execution
from fsdpcheck.oracle import Answer, Named

FALSE_ALARM = Fraction(1, 10**6)
"""Most probability that Gaussian noise of the right scale is called wrong."""
_WIDTH = 560
"""Of the one layer whose noise is measured: n = 560^2 draws find 1 % with probability 0.99 (see ``scale_limits``)."""


class _Seen(NamedTuple):
    """One parameter at one step: its gradient without noise, and what the noisy one is more, in float64."""

    step: int
    name: str
    drawn: Tensor
    clean: Tensor


def noisy(case: Case, steps: int | None = None) -> Case:
    """The case with noise, clipped as a whole, in ``steps`` steps (as many as it has, if None)."""
    count = case.step.steps if steps is None else steps
    step = replace(
        case.step, noise_multiplier=1.5, clip_groups="all", steps=count, resume=case.step.resume and count > 1
    )
    return replace(case, step=step)


def standing(case: Case) -> Case:
    """The case in two steps that move no parameter: the rate is 2^-60, and parameters are projected to integers.

    Then a noisy run and one without noise have the same parameters at every step, and differ by the noise alone.
    """
    optimizer = replace(case.step.optimizer, lr_exponent=60)
    step = replace(case.step, steps=2, optimizer=optimizer, resume=False)
    return replace(case, step=step, arithmetic=replace(case.arithmetic, project=True))


def large_and_empty(world_sizes: tuple[int, ...]) -> Case:
    """A step whose logical batch is empty, so that it releases noise alone, on one large parameter."""
    world = max((size for size in world_sizes if size <= 5 and _WIDTH % size == 0), default=min(world_sizes))
    layout = BatchLayout("listed", 1, lists=((),) * world)
    step = StepSpec("linear", normaliser=32, clipping="exact", clip_norm=3, noise_multiplier=1.5)
    model = ModelSpec((LayerSpec(_WIDTH),), features=_WIDTH)
    return Case(model, MeshSpec(world), layout, step, Arithmetic(project=False), seed=1)


def assert_noise_once(noisy: Execution, clean: Execution) -> None:
    """Every element of every gradient has noise, at every step another, on every rank the same, and nothing else has.

    No draw is used twice, over all elements, parameters and steps, as far as the rounding of gradients of whatever size
    lets it be seen (draws.py); honest noise is called so with probability ``FALSE_ALARM`` at most. Frozen parameters
    stand still.
    """
    seen: list[_Seen] = []
    ranks = completed(noisy)
    completed(clean)
    for k in range(noisy.request.case.step.steps):
        (_, first), *others = recorded(noisy, k, "grads")
        for rank, other in others:
            cause = partial(diagnosis.noise.of_ranks, noisy.request.case, [first, *(own for _, own in others)])
            _require_same(first, other, f"step {k}, rank {rank} against rank {ranks[0].rank}", cause)
        _, without = next(iter(recorded(clean, k, "grads")))
        require_same_form("a noisy gradient has another form", first, without, f"step {k}, rank {ranks[0].rank}")
        drawn = {name: value.double() - without[name].double() for name, value in first.items()}
        _require_noise(noisy, drawn, without, k)
        seen += [_Seen(k, name, value, without[name]) for name, value in drawn.items() if value.numel()]
    _require_own(noisy, seen)
    trained = trained_names(noisy.request.case)
    for result in ranks:
        for name in sorted(result.initial.keys() - ranks[0].steps[0].grads.keys()):  # type: ignore[union-attr]
            where = f"step 0, rank {result.rank}, {name}"
            if name in trained:
                raise Violation("a trained parameter has no noise", got="no gradient", wanted="a draw for each element",
                                where=where)  # fmt: skip
            if not alike(result.steps[0].params[name], result.initial[name]):
                raise Violation("a frozen parameter moved", got="other values", wanted="as they were", where=where)


def assert_noise_scale(execution: Execution, answer: Answer) -> None:
    """The released gradient of an empty batch has mean square (s C / N)^2, within limits that have a stated error rate.

    Tested on the sum of squares of the largest parameter. Other parameters have to have noise at all.
    """
    case = answer.case
    if any(bool(value.any()) for value in answer.steps[0].used.values()):
        raise UsageError("the case releases more than noise; next: give it an empty batch")
    completed(execution)
    deviation = case.step.noise_multiplier * answer.clip_norm / case.step.normaliser
    for rank, grads in recorded(execution, 0, "grads"):
        name, largest = max(grads.items(), key=lambda item: item[1].numel())
        drawn, (low, high) = largest.double().flatten() / deviation, scale_limits(largest.numel())
        found = math.sqrt(float(drawn.square().sum()) / len(drawn))
        if not low <= found <= high:
            raise Violation(
                "the noise has the wrong scale",
                got=f"{found!r} * s C / N over {len(drawn)} draws",
                wanted=f"between {low!r} and {high!r}, s C / N = {deviation!r}",
                where=f"step 0, rank {rank}, {name}",
                cause=partial(diagnosis.noise.of_scale, answer, found, low, high),
            )


def scale_limits(n: int) -> tuple[float, float]:
    """Limits of sqrt(sum z^2 / n) that n Gaussians leave with probability ``FALSE_ALARM`` at most.

    With t = -ln(FALSE_ALARM / 2): P(sum > n + 2 sqrt(n t) + 2 t) and P(sum < n - 2 sqrt(n t)) are at most exp(-t).
    Source: Laurent, Massart 2000, doi:10.1214/aos/1015957395, lemma 1.
    """
    t = -math.log(FALSE_ALARM / 2)
    return math.sqrt(max(1 - 2 * math.sqrt(t / n), 0.0)), math.sqrt(1 + 2 * math.sqrt(t / n) + 2 * t / n)


def _require_same(first: Named, other: Named, where: str, cause: Diagnose) -> None:
    for name, value in first.items():
        if not alike(other.get(name), value):
            what, where = "the ranks have different noise", f"{where}, {name}"
            raise Violation(what, got="other bits", wanted="equal gradients", where=where, cause=cause)


def _require_noise(noisy: Execution, drawn: Named, clean: Named, step: int) -> None:
    """Raise Violation for an element without noise."""
    for name, value in drawn.items():
        missing = value == 0
        if bool(missing.any()):
            index = first_index(missing)
            at = f"step {step}, {name}{list(index)}; {int(missing.sum())} of {value.numel()}"
            cause = partial(diagnosis.noise.of_missing, noisy.request.case, drawn, clean)
            raise Violation("an element has no noise", got="0.0", wanted="a draw", where=at, cause=cause)


def _require_own(noisy: Execution, seen: list[_Seen]) -> None:
    """Raise Violation for a draw that is used twice, and UsageError where the scale of the noise is not known."""
    step = noisy.request.case.step
    deviation = step.noise_multiplier * noisy.request.clip_norm / step.normaliser
    if not 0 < deviation < math.inf:
        raise UsageError(f"noise of standard deviation {deviation} cannot be judged; next: give the run its clip norm")
    if not seen:
        return
    drawn = torch.cat([each.drawn.flatten() for each in seen])
    clean = torch.cat([each.clean.double().flatten() for each in seen])
    unit = max(torch.finfo(each.clean.dtype).eps for each in seen) / 2
    pair = used_twice(drawn, clean, deviation, unit, FALSE_ALARM)
    if pair is None:
        return
    owners = [Draw(each.step, each.name, place) for each in seen for place in range(each.drawn.numel())]
    before, here = (owners[place] for place in pair)
    like = {each.name: each.drawn for each in seen}
    cause = partial(diagnosis.noise.of_used_twice, noisy.request.case, here, before, like)
    got, wanted = number(drawn[pair[1]]), f"another draw than {number(drawn[pair[0]])}, up to rounding"
    raise Violation("a draw is used twice", got=got, wanted=wanted, where=str(here), cause=cause)
