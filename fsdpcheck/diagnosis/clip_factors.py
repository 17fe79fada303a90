"""Causes of wrong clip factors [n]: wrong norms, or a wrong expression of right norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.diagnosis import bits, joint_clipping, norms
from fsdpcheck.diagnosis.cause_fit import chunks, fits
from fsdpcheck.findings.cause import EXACT, WEAK, Cause
from fsdpcheck.oracle import INSTRUMENT, Answer, Named

_EPS = (1e-6, 1e-8)  # what implementations add
_IN_WORDS = {"divide": "torch.div(C, norm)", "reciprocal": "norm.reciprocal() * C, which C / norm is in PyTorch"}


def candidates_everywhere(answer: Answer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """Candidates factors [n] that are wrong alike on all ranks."""
    yield from candidates(answer, step, None)
    if answer.case.step.clipping not in ("none", "unclipped"):
        yield from ((norms.MIXED, _factors(answer, found)) for found in norms.by_position(answer, step))


def candidates(answer: Answer, step: int, rank: int | None) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, factors [n]); those of one rank, or if None those that are alike on all."""
    wanted, rule = answer.steps[step], answer.rule
    if answer.case.step.clipping in ("none", "unclipped"):
        return
    for cause, found in norms.candidates(answer, step, rank):
        yield cause, _factors(answer, found)
    right = wanted.norms
    for eps in sorted({0.0, *_EPS} - {rule.eps}):
        text = f"eps = {eps:g} stands beside the norm, not {rule.eps:g}"
        yield Cause(f"eps {eps:g}", text), oracle.factors(right, answer.clip_norm, replace(rule, eps=eps))
    quotient = torch.full_like(right, answer.clip_norm) / right
    for eps in sorted({*_EPS, rule.eps} - {0.0}):
        inside = (wanted.squared_norms.to(right.dtype) + eps).sqrt()
        plain = replace(rule, eps=0.0)
        found = oracle.factors(inside, answer.clip_norm, plain)
        yield Cause(f"eps {eps:g} inside", f"eps = {eps:g} is added to the squared norm"), found
        yield Cause(f"eps {eps:g} outside", f"eps = {eps:g} is added to the quotient"), (quotient + eps).clamp(max=1)
    yield from of_few_bits(wanted.factors) if rank is not None else ()
    for cause, of_chunk in joint_clipping.factors(answer, step) if rank is not None else ():
        found = wanted.factors.clone()
        for own in chunks(answer.case, step, wanted)[rank or 0]:
            found[own] = of_chunk(own)
        yield cause, found
    yield Cause("all one", "every factor is 1: nothing is clipped"), torch.ones_like(right)
    yield Cause("not clamped", "factors are not clamped to 1"), quotient
    yield Cause("factor squared", "it is the square of the factor"), wanted.factors.square()


def other_limit(answer: Answer, step: int, mine: list[int], got: Tensor) -> Iterator[Cause]:
    """Whether factors [b] of the samples ``mine`` are those of a clip norm that is a round multiple of the case's.

    The multiple is read off the first sample that is clipped. Weak where only one is: its factor fits some multiple.
    """
    rule, right = answer.rule, answer.steps[step].norms[mine]
    clipped = [place for place in range(len(got)) if 0 < got[place] < 1]
    if answer.case.step.clipping in ("none", "unclipped") or len(answer.clip_norms) > 1 or not clipped:
        return
    times = float(got[clipped[0]] * (right[clipped[0]] + rule.eps)) / answer.clip_norm
    multiple = float(f"{times:.2g}")
    if multiple != 1 and fits(answer.case, got, oracle.factors(right, multiple * answer.clip_norm, rule)):
        text = f"samples are clipped to {multiple:g} times the clip norm"
        yield Cause(f"clip norm {multiple:g}", text, EXACT if len(clipped) > 1 else WEAK)


def of_few_bits(right: Tensor) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, factors) of right ones that are rounded to fewer bits."""
    for count in bits.TYPES:
        yield Cause(f"factors of {count} bits", f"clip factors are {bits.words(count)}"), bits.rounded(right, count)


def undeclared(answer: Answer, step: int, mine: list[int], got: Tensor) -> list[Cause] | None:
    """Whether factors [b] of the samples ``mine``, right up to rounding, are those of an expression not declared."""
    cause, found = _undeclared(answer, step)
    right = answer.steps[step].factors[mine]
    return [cause] if torch.equal(got, found[mine]) and not torch.equal(got, right) else None


def undeclared_in(
    answer: Answer, step: int, got: Mapping[str, Tensor], explains: Callable[[Named], Named]
) -> list[Cause]:
    """The same of what is right up to rounding, read off the instrument of a probe.

    ``explains``: what ``got`` would be for a gradient.
    """
    wanted = answer.steps[step]
    if answer.case.step.clipping != "probe" or len(answer.clip_norms) > 1 or not len(wanted.samples):
        return []
    places = [sample - step * answer.case.layout.batch_size for sample in wanted.samples]
    right = wanted.used[INSTRUMENT].double()
    cause, found = _undeclared(answer, step)
    other = right.clone()
    other[places, 0] = found.double() * (right[places, 0] / wanted.factors.double())
    said = explains({**wanted.used, INSTRUMENT: other.to(wanted.used[INSTRUMENT].dtype)})[INSTRUMENT]
    same = torch.equal(got[INSTRUMENT].double(), said.double())
    return [cause] if same and not torch.equal(said, explains(wanted.used)[INSTRUMENT]) else []


def _undeclared(answer: Answer, step: int) -> tuple[Cause, Tensor]:
    """The factors [n] of the expression that the adapter does not declare: right, but for their rounding."""
    expression: Literal["divide", "reciprocal"] = "divide" if answer.rule.expression == "reciprocal" else "reciprocal"
    rule = replace(answer.rule, expression=expression)
    text = (
        f"the factors are, bit for bit, those of {_IN_WORDS[expression]}, and Features.factor declares the other"
        f" expression: if this one is meant, declare FactorRule(expression={expression!r})"
    )
    return Cause(f"expression {expression}", text), oracle.factors(answer.steps[step].norms, answer.clip_norm, rule)


def _factors(answer: Answer, found: Tensor) -> Tensor:
    return oracle.factors(found, answer.clip_norm, answer.rule)
