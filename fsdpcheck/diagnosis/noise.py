"""Causes of wrong noise: a wrong scale, a wrong place, or the draw of another place.

Seen is noise alone: what a step released, less what it releases without noise. Legend: W ranks, S shards, K
micro-batches, N the normaliser, C the clip norm, s the noise multiplier, z noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import bits, shards
from fsdpcheck.diagnosis.cause_fit import mentions, rounding, whole_numbers
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload import batches
from fsdpcheck.workload.clip_groups import is_instrument


class Draw(NamedTuple):
    """Whose draw a value is: element ``place`` of the flattened ``parameter`` at ``step``."""

    step: int
    parameter: str
    place: int

    def __str__(self) -> str:
        return f"step {self.step}, {self.parameter}, element {self.place}"


class Scaled(NamedTuple):
    """Noise of ``parameter`` ("": of all but the largest) at ``step``, of which so many ``draws`` are seen.

    It is ``found`` times as large as s C / N; right noise lies between ``low`` and ``high``.
    """

    step: int
    parameter: str
    draws: int
    found: float
    low: float
    high: float

    @property
    def right(self) -> bool:
        return self.low <= self.found <= self.high


class Related(NamedTuple):
    """A correlation that was ``found`` over so many ``draws`` of ``one`` and ``other``, which differ in ``kind``."""

    kind: str
    one: str
    other: str
    draws: int
    found: float


def of_scales(answer: Answer, scaled: Sequence[Scaled]) -> Causes:
    """Causes of noise whose scale is not right everywhere: which steps or parameters stand out, and how far."""
    told = [each for each in scaled if each.parameter]
    wrong = [each for each in told if not each.right]
    if not wrong:
        return []
    worst = max(wrong, key=lambda each: each.draws)
    large = [each for each in told if each.draws == max(each.draws for each in told)]
    if not any(each.right for each in large):
        return of_scale(answer, worst.found, worst.low, worst.high)
    steps = sorted({each.step for each in large if not each.right})
    names = list(dict.fromkeys(each.parameter for each in wrong))
    which = f"step {', '.join(map(str, steps))}" if steps else mentions(names)
    key = "scale of steps" if steps else "scale of parameters"
    return [Cause(key, f"the noise of {which} is {worst.found:.4g} times as large as s C / N", PATTERN)]


def of_scale(answer: Answer, found: float, low: float, high: float) -> Causes:
    """Causes of noise ``found`` times as large as s C / N, if right noise lies between ``low`` and ``high``."""
    if not found:
        return [Cause("no noise", "no noise is added at all")]
    fact = f"the noise is {found:.4g} times as large as s C / N"
    named = [
        Cause(key, f"{fact}, {why}") for key, ratio, why in _scales(answer) if low * ratio <= found <= high * ratio
    ]
    return [*named, Cause("scale", fact, PATTERN)]


def of_shape(z: Tensor) -> Causes:
    """Causes of draws z [n] that have mean square 1 and are not Gaussian."""
    bound, largest = math.sqrt(3), float(z.abs().max())
    if largest <= bound * (1 + _NEAR) and len(z) >= _ENOUGH:
        spread = (z.sort().values - torch.linspace(-bound, bound, len(z), dtype=z.dtype)).abs().max()
        if spread < _NEAR * bound:
            return [Cause("uniform", "draws are uniform, not Gaussian")]
    return [Cause("shape", f"no draw is larger than {largest:.3g} * s C / N", PATTERN)] if largest < _TAIL else []


_NEAR, _ENOUGH, _TAIL = 0.02, 10_000, 4.0


def of_related(wrong: Sequence[Related]) -> Causes:
    """Causes of parts of the noise that are correlated, the strongest of what they have in common."""
    kind = next(kind for kind in _KINDS if any(each.kind == kind for each in wrong))
    of_kind = (each for each in wrong if each.kind == kind)
    first = max(of_kind, key=lambda each: (abs(each.found) > ALIKE, each.draws, abs(each.found)))
    if abs(first.found) > ALIKE:
        text = f"the noise of {first.other} is that of {first.one}{', negated' if first.found < 0 else ''}"
        return [Cause(f"{kind} {'negated' if first.found < 0 else 'alike'}", text)]
    shared = f"the noise of {first.one} and {first.other} has a correlation of {first.found:.2g}"
    return [Cause(f"{kind} related", f"{shared}: {_KINDS[kind]}", PATTERN)]


ALIKE = 1 - 1e-6
"""A correlation above this is that of one and the same draws, rounded."""
_KINDS = {
    "steps": "a part of each draw is the same in every step",
    "parameters": "a part of each draw is the same in several parameters",
    "parameters and steps": "a part of each draw is used in another parameter at another step",
    "shards": "a part of each draw is the same in every shard",
    "rows": "a part of each draw is the same in neighbouring rows",
    "elements": "a part of each draw is the same in neighbouring elements",
    "far elements": "a part of each draw is the same in elements that far from one another",
}
"""What a pair of related parts differs in, and what follows; the first that is found is named."""


def of_ranks(case: TrainingCase, grads: Sequence[Mapping[str, Tensor]]) -> Causes:
    """Causes of noisy gradients that are not equal on all ranks; by rank."""
    size = case.mesh.dp_shard
    replicas = [grads[first : first + size] for first in range(0, len(grads), size)]
    agree = all(_equal(own[0], other) for own in replicas for other in own)
    if len(replicas) > 1 and agree:
        text = "replicas draw noise for themselves: its seed depends on the replica of a rank, and they drift apart"
        return [Cause("noise by replica", text)]
    if all(not _equal(one, other) for one, other in itertools.combinations(grads, 2)):
        return [Cause("noise by rank", "each rank has noise of its own that the others do not see: they drift apart")]
    return []


def of_used_twice(
    case: TrainingCase, here: Draw, before: Draw, like: Mapping[str, Tensor], negated: bool = False
) -> Causes:
    """Causes of one draw found at two places; ``like``: tensors of the parameters' shapes."""
    fact = f"it is the draw of {before}"
    if negated:
        return [Cause("negated", f"{fact}, negated", PATTERN)]
    if here.parameter != before.parameter:
        same = here.step == before.step and here.place == before.place
        return [Cause("parameters alike", f"{fact}: which parameter it is for does not reach the noise")] * same or [
            Cause("used twice", fact, PATTERN)
        ]
    if here.step != before.step:
        same = here.place == before.place
        return [Cause("steps alike", f"{fact}: the number of the step does not reach the noise")] * same or [
            Cause("used twice", fact, PATTERN)
        ]
    apart = [flat[here.place] != flat[before.place] for flat in _flat_owners(case, like, here.parameter)]
    if all(apart):
        return [Cause("shards alike", f"{fact}: every rank draws for its shard from the beginning")]
    return [Cause("elements alike", f"{fact}: noise repeats within a parameter")] if not any(apart) else []


def of_missing(case: TrainingCase, drawn: Named, clean: Mapping[str, Tensor]) -> Causes:
    """Causes of noise that is not on every element; ``clean``: the same gradients without noise."""
    missing = {name: value == 0 for name, value in drawn.items()}
    if all(bool(mask.all()) for mask in missing.values()):
        return [Cause("no noise", "no noise is added at all")]
    found = []
    if all(bool((mask == (clean[name] == 0)).all()) for name, mask in missing.items()):
        text = "noise is added only where the gradient is not zero: what no sample reaches is released without any"
        found.append(Cause("noise where gradient", text))
    for owner in shards.owners(case, drawn) if case.mesh.dp_shard > 1 else ():
        for shard in range(case.mesh.dp_shard):
            if all(bool((mask == (owner[name] == shard)).all()) for name, mask in missing.items()):
                found.append(Cause(f"no noise: shard {shard}", f"the shard of rank {shard} gets no noise"))
    whole = [name for name, mask in missing.items() if bool(mask.all()) and mask.numel()]
    if whole and not any(bool(mask.any()) for name, mask in missing.items() if name not in whole):
        found.append(Cause("no noise: parameters", f"{mentions(whole)}: no noise is added to them at all", PATTERN))
    return found


def of_few_bits(what: str, count: int) -> Causes:
    """``what`` has at most ``count`` bits."""
    return [Cause(f"noise of {count} bits", f"{what}: {bits.words(count)}")]


def of_siblings(
    first: tuple[Answer, Sequence[Mapping[str, Tensor]]], second: tuple[Answer, Sequence[Mapping[str, Tensor]]]
) -> Causes:
    """Causes of two runs that must have the same noise in their first step; (answer, gradients by rank) of each."""
    for answer, grads in (first, second):
        if found := of_ranks(answer.case, grads) if not all(_equal(grads[0], own) for own in grads) else ():
            return found
    drawn = [_drawn(answer, grads[0]) for answer, grads in (first, second)]
    found = []
    for (answer, _), own in zip((first, second), drawn, strict=True):
        if _repeats(answer, own):
            text = "every shard of a parameter has the same noise: each rank draws for its shard from the beginning"
            found.append(Cause("shards alike", text))
    return found or [*_ratios(first[0], second[0], *drawn), *_by_micro_batch(first[0], second[0], *drawn)]


def of_neighbours(
    first: tuple[Answer, Mapping[str, Tensor]], second: tuple[Answer, Mapping[str, Tensor]], rank: int
) -> Causes | None:
    """Causes of noise that is not the same for neighbouring batches; (answer, gradients of ``rank``) of each."""
    answer, one, other = first[0], _drawn(*first), _drawn(*second)
    differs = [not _near(answer, name, z, again) for name, z, again in _pairs(one, other)]
    if not any(differs):
        return None  # what differs is no noise
    found = []
    for key, what, ratios in _counts(first[0].case, second[0].case, one, rank):
        for word, power in (("divided", -1.0), ("multiplied", 1.0)):
            values = {name: value * ratios[name] ** power for name, value in one.items()}
            if all(_near(answer, name, again, value) for name, value, again in _pairs(values, other)):
                text = f"the noise is {word} by the number of samples {what}: its scale follows the batch"
                found.append(Cause(f"noise {word}: {key}", text))
    if not found and all(bool((z != again).all()) for _, z, again in _pairs(one, other)):
        found.append(Cause("other draws", "all noise is another: what is drawn follows the batch", PATTERN))
    return found


def _counts(first: TrainingCase, second: TrainingCase, like: Named, rank: int) -> Iterator[tuple[str, str, Named]]:
    """(key, whose samples are counted, by element how many times as many the second case has)."""
    one, other = ([sum(map(len, own)) for own in batches.indices(case, 0)] for case in (first, second))
    whole = max(sum(other), 1) / max(sum(one), 1)
    yield "batch", "of the whole batch", {name: torch.full_like(value, whole) for name, value in like.items()}
    own = torch.tensor([max(b, 1) / max(a, 1) for a, b in zip(one, other, strict=True)], dtype=torch.float64)
    replica = rank // first.mesh.dp_shard * first.mesh.dp_shard
    for owner in shards.owners(first, like):
        ranks = {name: (replica + value).clamp(max=len(own) - 1) for name, value in owner.items()}
        yield "rank", "that each rank has", {name: own[value] for name, value in ranks.items()}


def _scales(answer: Answer) -> Iterator[tuple[str, float, str]]:
    """(key, ratio to s C / N, what would give it); ratios of 1 left out."""
    case = answer.case
    world, n = float(case.world_size), float(case.step.normaliser)
    c, s = math.hypot(*answer.clip_norms), case.step.noise_multiplier
    told = [
        ("sqrt(W)", math.sqrt(world), "sqrt(W): each rank adds noise of the whole scale, and the ranks are summed"),
        ("1/sqrt(W)", 1 / math.sqrt(world), "1/sqrt(W): each rank adds noise of its own, and the ranks are averaged"),
        ("W", world, "W: the same noise of every rank is summed, or not divided where the gradient is"),
        ("1/W", 1 / world, "1/W: noise is divided by the number of ranks once more"),
        ("N", n, "N: noise is not divided by the normaliser"),
        ("1/C", 1 / c, "1/C: the clip norm is left out"),
        ("1/s", 1 / s, "1/s: the noise multiplier is left out"),
        ("sqrt(2)", math.sqrt(2), "sqrt(2): noise is added twice, each time another"),
        ("2", 2.0, "2: the same noise is added twice"),
        ("max C_l", max(answer.clip_norms) / c, "the largest C_l stands for the root of the sum of their squares"),
        ("sum C_l", sum(answer.clip_norms) / c, "the sum of the C_l stands for the root of the sum of their squares"),
    ]
    for key, whole in whole_numbers(n):
        told.append((f"N {key}", n / whole, f"N / {whole}: the normaliser is taken for a whole number, {key}"))
    yield from (each for each in told if each[1] != 1)


def _drawn(answer: Answer, grads: Mapping[str, Tensor]) -> Named:
    return {name: grads[name].double() - value.double() for name, value in answer.steps[0].used.items()}


def _near(answer: Answer, name: str, one: Tensor, other: Tensor, places: Tensor | None = None) -> bool:
    """Whether noise is equal up to what adding it to a gradient rounded."""
    room = rounding(answer.case, answer.steps[0].used[name]).flatten()
    room = room if places is None else room[places]
    return bool(((one - other).abs() <= room + rounding(answer.case, one)).all())


def _repeats(answer: Answer, drawn: Named) -> bool:
    """Whether, in one way of sharding, all pieces of each parameter begin with the same noise."""
    if answer.case.mesh.dp_shard == 1:
        return False
    for owner in shards.owners(answer.case, drawn):
        told = []
        for name, value in drawn.items():
            flat, own = value.flatten(), owner[name].flatten()
            shares = [(own == shard).nonzero().flatten() for shard in range(answer.case.mesh.dp_shard)]
            pieces = [share for share in shares if len(share)]
            for piece in pieces[1:]:
                size = min(len(piece), len(pieces[0]))
                told.append(_near(answer, name, flat[pieces[0][:size]], flat[piece[:size]], piece[:size]))
        if told and all(told):
            return True
    return False


def _ratios(first: Answer, second: Answer, one: Named, other: Named) -> Iterator[Cause]:
    """Whether one run's noise is the other's times a power of the number of ranks, or of micro-batches."""
    counts = {
        "W": first.case.world_size / second.case.world_size,
        "K": first.case.step.micro_batches / second.case.step.micro_batches,
    }
    for name, ratio in counts.items():
        for word, power in ((name, 1.0), (f"sqrt({name})", 0.5), (f"1/{name}", -1.0), (f"1/sqrt({name})", -0.5)):
            near = (_near(first, key, z, again * ratio**power) for key, z, again in _pairs(one, other))
            if ratio != 1 and all(near):
                yield Cause(f"noise by {word}", f"the noise is multiplied by {word}, which must not show in it")


def _by_micro_batch(first: Answer, second: Answer, one: Named, other: Named) -> Iterator[Cause]:
    """Where nothing but K differs: whether all noise does."""
    counts = [answer.case.step.micro_batches for answer in (first, second)]
    if counts[0] == counts[1] or first.case.mesh != second.case.mesh:
        return
    if not any(bool((z == again).any()) for _, z, again in _pairs(one, other)):
        text = "noise is drawn in every micro-batch: draw it once a step, after the last one"
        yield Cause("noise by micro-batch", text)


def _pairs(one: Named, other: Named) -> list[tuple[str, Tensor, Tensor]]:
    """(name in one run, its noise, the other's), flat; siblings may have other units, and instruments other sizes."""
    names, others = ([name for name in own if not is_instrument(name)] for own in (one, other))
    return [(name, one[name].flatten(), other[again].flatten()) for name, again in zip(names, others, strict=True)]


def _flat_owners(case: TrainingCase, like: Mapping[str, Tensor], name: str) -> list[Tensor]:
    return [owner[name].flatten() for owner in shards.owners(case, like)]


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
