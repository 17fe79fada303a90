"""Cause fit: whether a mistake computes what was got, up to the mistake's own rounding. Never part of a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.findings.cause import EXACT, WEAK, Cause
from fsdpcheck.oracle import Named, StepAnswer
from fsdpcheck.workload import batches

_CLOSE = 16  # units in the last place: a cause's rounding, not a tolerance of any verdict


def rounding(case: TrainingCase, value: Tensor) -> Tensor:
    """A few units in the last place of ``value``, in the case's dtype."""
    unit = 2.0**-53 if case.arithmetic.dtype == "float64" else 2.0**-24
    return value.double().abs() * (_CLOSE * unit)


def fits(case: TrainingCase, got: Tensor, value: Tensor) -> bool:
    """Whether two tensors of one shape, not empty, agree up to rounding; what overflows agrees with nothing finite."""
    if value.shape != got.shape or not got.numel():
        return False
    near = (got.double() - value.double()).abs() <= rounding(case, value)
    return bool(((near & value.isfinite()) | (got == value)).all())


def fitting(case: TrainingCase, got: Tensor, candidates: Iterable[tuple[Cause, Tensor]]) -> list[Cause]:
    """The causes that give ``got``."""
    return [cause for cause, value in candidates if fits(case, got, value)]


def ratios(case: TrainingCase, step: int) -> Iterator[tuple[str, float]]:
    """(name, value) of the ratios that name a culprit, those of value 1 left out."""
    world, micro = float(case.world_size), float(case.step.micro_batches)
    batch = float(sum(batches.logical_batch(case, step).values()))
    normaliser = float(case.step.normaliser)
    named = [
        ("W", world), ("1/W", 1 / world), ("sqrt(W)", math.sqrt(world)), ("1/sqrt(W)", 1 / math.sqrt(world)),
        ("W^2", world**2), ("1/W^2", world**-2), ("K", micro), ("1/K", 1 / micro), ("N", normaliser),
        ("1/N", 1 / normaliser), ("B/N", batch / normaliser), ("N/B", normaliser / batch if batch else 1.0),
    ]  # fmt: skip
    sizes = set(case.local_sizes)
    if len(sizes) == 1 and batch and 0 not in sizes:
        local = sizes.pop()
        named += [("B_local/B", local / batch), ("B/B_local", batch / local)]
    if case.mesh.dp_replicate > 1:
        replicas = float(case.mesh.dp_replicate)
        named += [("R", replicas), ("1/R", 1 / replicas), ("sqrt(R)", math.sqrt(replicas))]
        shards = world / replicas
        named += [("S", shards), ("1/S", 1 / shards), ("sqrt(S)", math.sqrt(shards))]
    yield from ((name, value) for name, value in named if value != 1)


ADDED_UP: Final = {
    "W": "added up over the ranks and not averaged; if that is meant, declare ArithmeticRule(averaging='none'), of"
    " functions of your own by --averaging none"
}  # fmt: skip
"""What may be behind a gradient that is off by a ratio of this name."""


def by_ratio(
    case: TrainingCase, step: int, key: str, text: str, behind: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Cause, float]]:
    """(cause, ratio); ``text`` with {} for its name and value, and what may be ``behind`` that name.

    With one replica, what is said of W holds for S.
    """
    for name, ratio in ratios(case, step):
        said = f": {behind[name]}" if name in behind else ""
        cause = Cause(f"{key} {name}", text.format(f"{name} = {ratio:.6g}") + said)
        yield cause, ratio
        if "W" in name and case.mesh.dp_replicate == 1:
            yield cause._replace(key=cause.key.replace("W", "S")), ratio


def whole_numbers(normaliser: float) -> Iterator[tuple[str, int]]:
    """(which way N is rounded, the whole number, 1 at least) if N is none itself."""
    if not float(normaliser).is_integer():
        yield "rounded down", max(1, math.floor(normaliser))
        yield "rounded up", math.ceil(normaliser)


def chunks(case: TrainingCase, step: int, wanted: StepAnswer) -> list[list[list[int]]]:
    """Per rank, per micro-batch, the rows (places in ``wanted.samples``) of the samples, in order."""
    place = {sample: row for row, sample in enumerate(wanted.samples)}
    return [[[place[sample] for sample in chunk] for chunk in own] for own in batches.indices(case, step)]


def rows(case: TrainingCase, step: int, wanted: StepAnswer) -> list[list[int]]:
    """Per rank, the rows of its samples in order."""
    return [[row for chunk in own for row in chunk] for own in chunks(case, step, wanted)]


def singled_out(
    case: TrainingCase, off: Sequence[float], owners: Sequence[int], places: Sequence[Sequence[int]], noun: str
) -> Iterator[Cause]:
    """Whether exactly the first (or last) sample of each micro-batch is wrong, all by one relative amount.

    ``off``: relative errors, 0 where right; ``places``: indices into it by micro-batch; ``owners``: how often each is
    among them. Weak where no micro-batch has a second sample, or only one is wrong: then anything looks so.
    """
    unit = 2.0**-52 if case.arithmetic.dtype == "float64" else 2.0**-23
    several = any(len(own) > 1 for own in places)
    for which, end in (("first", 0), ("last", -1)):
        shares = [sum(own[end] == row for own in places if own) / max(owners[row], 1) for row in range(len(off))]
        amounts = [amount / share for amount, share in zip(off, shares, strict=True) if share and amount]
        if not amounts or any(amount and not share for amount, share in zip(off, shares, strict=True)):
            continue
        room = abs(amounts[0]) / 64 + 4 * unit
        if all(abs(amount - amounts[0]) <= room for amount in amounts) and len(amounts) == sum(map(bool, shares)):
            text = f"the {noun} of the {which} sample of each micro-batch is off by {amounts[0]:+.1e} of it"
            strength = EXACT if several and len(amounts) > 1 else WEAK
            yield Cause(f"{which} of each micro-batch", text, strength)


def mentions(names: Sequence[str]) -> str:
    """A few names in full, of many the first."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def differs(got: Mapping[str, Tensor], right: Named) -> list[str]:
    """Names of the tensors that are not equal."""
    return [name for name in right if bool((got[name] != right[name]).any())]
