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
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import alike, first_index, number, require_same_form
from fsdpcheck.checks._read import completed, recorded
from fsdpcheck.checks.noise_draws import used_twice
from fsdpcheck.checks.shape_matched_replay import trained_names
from fsdpcheck.diagnosis import bits
from fsdpcheck.diagnosis.noise import Draw
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.oracle import Answer, Named

FALSE_ALARM = Fraction(1, 10**6)
"""Most probability that Gaussian noise of the right scale is called wrong."""
_FEW, _ENOUGH = 8, 4
"""Bits of a bfloat16, and how many numbers are not of so few by chance."""


class _Seen(NamedTuple):
    """One parameter at one step: its gradient without noise, and what the noisy one is more, in float64."""

    step: int
    name: str
    drawn: Tensor
    clean: Tensor


def noisy(case: TrainingCase, steps: int | None = None) -> TrainingCase:
    """The case with noise, clipped as a whole, in ``steps`` steps (as many as it has, if None)."""
    count = case.step.steps if steps is None else steps
    step = replace(case.step.of_steps(count), noise_multiplier=1.5, clip_groups="all")
    return replace(case, step=step)


def standing(case: TrainingCase, steps: int = 3) -> TrainingCase:
    """The case in ``steps`` steps that move no parameter: the rate is 2^-60, and parameters are projected to integers.

    Then a noisy run and one without noise have the same parameters at every step, and differ by the noise alone.
    """
    optimizer = replace(case.step.optimizer, lr_exponent=60)
    step = replace(case.step, steps=steps, optimizer=optimizer, resume=False)
    return replace(case, step=step, arithmetic=replace(case.arithmetic, project=True))


def assert_noise_once(noisy: Execution, clean: Execution) -> None:
    """Every element of every gradient has noise, at every step another, on every rank the same, and nothing else has.

    No draw is used twice, as it was or negated, over all elements, parameters and steps, as far as the rounding of
    gradients of whatever size lets it be seen (checks/noise_draws.py); honest noise is called so with probability
    ``FALSE_ALARM`` at most. Frozen parameters stand still.
    """
    seen: list[_Seen] = []
    ranks = completed(noisy)
    completed(clean)
    for k in range(noisy.request.training.step.steps):
        first = same_on_all_ranks(noisy, k)
        _, without = next(iter(recorded(clean, k, "grads")))
        require_same_form("a noisy gradient has another form", first, without, f"step {k}, rank {ranks[0].rank}")
        drawn = {name: value.double() - without[name].double() for name, value in first.items()}
        _require_noise(noisy, drawn, without, k)
        seen += [_Seen(k, name, value, without[name]) for name, value in drawn.items() if value.numel()]
    _require_own(noisy, seen)
    trained = trained_names(noisy.request.training)
    for result in ranks:
        for name in sorted(result.initial.keys() - ranks[0].steps[0].grads.keys()):  # type: ignore[union-attr]
            where = f"step 0, rank {result.rank}, {name}"
            if name in trained:
                raise Violation("a trained parameter has no noise", got="no gradient", wanted="a draw for each element",
                                where=where)  # fmt: skip
            if not alike(result.steps[0].params[name], result.initial[name]):
                raise Violation("a frozen parameter moved", got="other values", wanted="as they were", where=where)


def assert_noise_in_full_precision(noisy: Execution, answer: Answer) -> None:
    """At the first step every trained parameter has noise that needs more than 8 bits, the same on all ranks.

    Noise is what is released beyond the clipped sum, which ``answer`` has exactly. Of Gaussian noise in float32, of a
    deviation no smaller than a tenth of the sum, one number in 2^8 at most fits 8 bits by chance, itself or in the sum:
    all of 4 elements or more do with probability 2^-32. Parameters of fewer elements are judged together.
    Raises NotExact where all of them together have fewer.
    """
    case, clean = noisy.request.training, answer.steps[0].released
    completed(noisy)
    first = same_on_all_ranks(noisy, 0)
    require_same_form("a noisy gradient has another form", first, clean, "step 0")
    drawn = {name: value.double() - clean[name].double() for name, value in first.items()}
    if not (judged := _judged_together(drawn)):
        raise NotExact(f"all parameters together have fewer than {_ENOUGH} elements, too few to tell noise of few bits")
    for names in judged:
        where = f"step 0, {', '.join(names)}"
        if not any(bool(drawn[name].any()) for name in names):
            cause = partial(diagnosis.noise.of_missing, case, drawn, clean)
            raise Violation("a parameter has no noise", got="0.0", wanted="draws", where=where, cause=cause)
        for what, values in (("noise", drawn), ("sums with noise", first)):
            value = torch.cat([values[name].double().flatten() for name in names])
            if torch.equal(bits.rounded(value, _FEW), value):
                raise Violation(
                    "noise is not drawn and added in the parameters' precision",
                    got=f"{what} of at most {_FEW} bits: {number(value[0])}, ...",
                    wanted=f"noise of {case.arithmetic.dtype}",
                    where=where,
                    cause=partial(diagnosis.noise.of_few_bits, what, _FEW),
                )


def _judged_together(drawn: Named) -> list[list[str]]:
    """Names of parameters: each large enough by itself, then all small ones if they are enough together."""
    small = [name for name, value in drawn.items() if value.numel() < _ENOUGH]
    enough = sum(drawn[name].numel() for name in small) >= _ENOUGH
    return [*([name] for name in drawn if name not in small), *([small] if enough else [])]


def same_on_all_ranks(execution: Execution, step: int) -> Named:
    """The gradients of a step, which are equal on all ranks, else raises Violation."""
    (first_rank, first), *others = recorded(execution, step, "grads")
    for rank, other in others:
        cause = partial(diagnosis.noise.of_ranks, execution.request.training, [first, *(own for _, own in others)])
        _require_same(first, other, f"step {step}, rank {rank} against rank {first_rank}", cause)
    return dict(first)


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
            cause = partial(diagnosis.noise.of_missing, noisy.request.training, drawn, clean)
            raise Violation("an element has no noise", got="0.0", wanted="a draw", where=at, cause=cause)


def _require_own(noisy: Execution, seen: list[_Seen]) -> None:
    """Raise Violation for a draw that is used twice, and UsageError where the scale of the noise is not known."""
    step = noisy.request.training.step
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
    negated = bool(drawn[pair[0]] * drawn[pair[1]] < 0)
    cause = partial(diagnosis.noise.of_used_twice, noisy.request.training, here, before, like, negated)
    got = number(drawn[pair[1]])
    wanted = f"another draw than {number(drawn[pair[0]])}{', negated' * negated}, up to rounding"
    raise Violation("a draw is used twice", got=got, wanted=wanted, where=str(here), cause=cause)
