"""Names the probable cause of a difference from its ratio or pattern. Never part of a verdict.

Each suspicion says what a known mistake would have computed, as one weight per sample (a wrong gradient is a wrongly
weighted sum of per-sample gradients), one ratio, or one vector. A cause is named when what was got is exactly that and
at most two suspicions fit; otherwise the answer is "".

Legend: n samples of a step, W ranks, K micro-batches, B samples of the logical batch, N the normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fsdpcheck import layouts, oracle
from fsdpcheck.case import Case
from fsdpcheck.oracle import Answer, Named, StepAnswer
from fsdpcheck.program import at_step

_EPS = (1e-6, 1e-8)  # what implementations add
_CLOSE = 16  # units in the last place: a suspicion's rounding, not a tolerance of any verdict


def of_update(answer: Answer, step: int, got: Mapping[str, Tensor]) -> str:
    """Cause of wrong parameters after ``step`` (whose parameters before were right); "" if none fits."""
    case, wanted = answer.case, answer.steps[step]
    if case.step.optimizer.kind == "sgd":
        rate = 2.0 ** -at_step(case.step.optimizer, step).lr_exponent
        given = {
            name: value.double() + (wanted.after[name].double() - got[name].double()) / rate
            for name, value in wanted.used.items()
        }
        slack = {name: _rounding(case, wanted.after[name]) / rate for name in given}
        cause = _of_weights(answer, wanted, step, given, slack)
        if cause:
            return cause
    return _of_places(case, wanted, got, wanted.after)


def of_gradient(answer: Answer, step: int, got: Mapping[str, Tensor]) -> str:
    """Cause of a wrong released gradient; "" if none fits."""
    wanted = answer.steps[step]
    given = {name: got[name].double() for name in wanted.used}
    slack = {name: torch.zeros_like(value) for name, value in given.items()}
    return _of_weights(answer, wanted, step, given, slack) or _of_places(answer.case, wanted, got, wanted.used)


def of_norms(answer: Answer, step: int, rank: int, got: Tensor) -> str:
    """Cause of wrong per-sample norms [local samples of ``rank``]; "" if none fits."""
    wanted = answer.steps[step]
    mine = _rows(answer.case, step, wanted)[rank]
    suspected = {name: norms[mine] for name, norms in _suspected_norms(answer, step, rank)}
    return _which(answer.case, got, suspected) or _of_order(answer.case, wanted.norms, wanted, step, rank, got)


def of_factors(answer: Answer, step: int, rank: int, got: Tensor) -> str:
    """Cause of wrong clip factors [local samples of ``rank``]; "" if none fits."""
    wanted = answer.steps[step]
    mine = _rows(answer.case, step, wanted)[rank]
    suspected = {name: factors[mine] for name, factors in _suspected_factors(answer, step, rank)}
    return _which(answer.case, got, suspected) or _of_order(answer.case, wanted.factors, wanted, step, rank, got)


def of_grad_norm(answer: Answer, step: int, got: float) -> str:
    """Cause of a wrong global gradient norm; "" if none fits."""
    wanted = answer.steps[step]
    norm = float(wanted.grad_norm)
    suspected = {f"{name} times too big": torch.tensor(norm * ratio) for name, ratio in ratios(answer.case, step)}
    for rank in range(answer.case.world_size):
        own = [_row_shard(value, rank, answer.case.world_size) for value in wanted.released.values()]
        squared = sum(float(value.double().square().sum()) for value in own)
        suspected[f"it is the norm of rank {rank}'s shard alone"] = torch.tensor(math.sqrt(squared))
    return _which(answer.case, torch.tensor(got), suspected)


def ratios(case: Case, step: int) -> Iterator[tuple[str, float]]:
    """(name, value) of the ratios that name a culprit, those of value 1 left out."""
    world, micro = float(case.world_size), float(case.step.micro_batches)
    batch = float(sum(layouts.logical_batch(case, step).values()))
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
    yield from ((name, value) for name, value in named if value != 1)


def _of_weights(answer: Answer, wanted: StepAnswer, step: int, given: Named, slack: Named) -> str:
    """The suspicions whose weighted sum of per-sample gradients is ``given``, up to ``slack``."""
    if answer.case.step.max_grad_norm is not None:
        return ""
    fitting = [
        name
        for name, weights in _suspected_weights(answer, wanted, step)
        if _fits(answer.case, wanted, weights, given, slack)
    ]
    return _named(fitting)


def _fits(case: Case, wanted: StepAnswer, weights: Tensor, given: Named, slack: Named) -> bool:
    for name, gradient in wanted.gradients.items():
        value = torch.tensordot(weights, gradient, dims=1)
        room = _rounding(case, torch.tensordot(weights.abs(), gradient.abs(), dims=1)) + slack[name]
        if not bool(((value - given[name]).abs() <= room).all()):
            return False
    return any(bool((given[name] - value.double()).abs().gt(slack[name]).any()) for name, value in wanted.used.items())


def _suspected_weights(answer: Answer, wanted: StepAnswer, step: int) -> Iterator[tuple[str, Tensor]]:
    """(suspicion, weights [n]) of the released gradient: sum of weight * per-sample gradient."""
    case = answer.case
    counts = torch.tensor(wanted.multiplicity, dtype=torch.float64)
    plain = counts / case.step.normaliser
    right = wanted.factors.double() * plain
    for name, ratio in ratios(case, step):
        yield f"the gradient is exactly {name} = {ratio:.6g} times the right one", right * ratio
    for row, sample in enumerate(wanted.samples):
        one = torch.zeros_like(right)
        one[row] = right[row] / counts[row]
        yield f"sample {sample} is left out once", right - one
        yield f"sample {sample} is counted once too often", right + one
    if case.step.private:
        yield "the gradient is not clipped at all", plain
        yield "the unclipped gradient leaked into the clipped one: their sum", right + plain
        for name, factors in _everywhere(answer, step):
            if torch.equal(factors, torch.ones_like(factors)):
                continue  # said above
            yield f"clipped by factors from wrong norms: {name}", factors.double() * plain
    yield from _suspected_shares(case, wanted, step, right)


def _suspected_shares(case: Case, wanted: StepAnswer, step: int, right: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Whole micro-batches, ranks, or their sizes gone wrong."""
    if case.layout.kind == "replicated":
        return
    occurring = torch.tensor(wanted.multiplicity, dtype=torch.float64)
    once = right / occurring
    chunks = layouts.indices(case, step)
    place = {sample: row for row, sample in enumerate(wanted.samples)}
    for chunk in range(case.step.micro_batches if case.step.micro_batches > 1 else 0):
        yield f"only micro-batch {chunk} counts", _pick(once, place, [own[chunk] for own in chunks])
    if case.world_size == 1:
        return
    for rank, own in enumerate(chunks):
        mine = _pick(once, place, own)
        yield f"only the samples of rank {rank} count: not reduced over the ranks", mine
        yield f"only the samples of rank {rank} count: W times them", mine * case.world_size
        yield f"the samples of rank {rank} are left out", right - mine
    means = torch.zeros_like(right)
    for own in chunks:
        size = sum(len(chunk) for chunk in own)
        if size:
            means += _pick(once, place, own) * case.step.normaliser / (case.world_size * size)
    yield "local means are averaged although the ranks hold different numbers of samples", means


def _pick(once: Tensor, place: Mapping[int, int], chunks: object) -> Tensor:
    weights = torch.zeros_like(once)
    for chunk in chunks:  # type: ignore[attr-defined]
        for sample in chunk:
            weights[place[sample]] += once[place[sample]]
    return weights


def _everywhere(answer: Answer, step: int) -> Iterator[tuple[str, Tensor]]:
    """Suspected factors [n] that are wrong alike on all ranks."""
    positions = _by_position(answer, step)
    yield from _suspected_factors(answer, step, None)
    if positions is not None:
        yield _MIXED, _factors(answer, positions)


_MIXED = "squared norms were summed over the ranks by position, mixing samples"


def _suspected_factors(answer: Answer, step: int, rank: int | None) -> Iterator[tuple[str, Tensor]]:
    """(suspicion, factors [n])."""
    wanted, rule = answer.steps[step], answer.rule
    if answer.case.step.clipping in ("none", "unclipped"):
        return
    for name, norms in _suspected_norms(answer, step, rank):
        yield name, _factors(answer, norms)
    norms = wanted.norms
    for eps in sorted({0.0, *_EPS} - {rule.eps}):
        other = replace(rule, eps=eps)
        yield f"eps = {eps:g} stands beside the norm, not {rule.eps:g}", oracle.factors(norms, answer.clip_norm, other)
    for eps in sorted({*_EPS, rule.eps} - {0.0}):
        inside = (wanted.squared_norms.to(norms.dtype) + eps).sqrt()
        yield f"eps = {eps:g} is added to the squared norm", _ratio(answer, inside)
        outside = (torch.full_like(norms, answer.clip_norm) / norms + eps).clamp(max=1.0)
        yield f"eps = {eps:g} is added to the quotient", outside
    yield "every factor is 1: nothing is clipped", torch.ones_like(norms)
    yield "factors are not clamped to 1", torch.full_like(norms, answer.clip_norm) / norms


def _factors(answer: Answer, norms: Tensor) -> Tensor:
    return oracle.factors(norms, answer.clip_norm, answer.rule)


def _ratio(answer: Answer, norms: Tensor) -> Tensor:
    return oracle.factors(norms, answer.clip_norm, replace(answer.rule, eps=0.0))


def _suspected_norms(answer: Answer, step: int, rank: int | None) -> Iterator[tuple[str, Tensor]]:
    """(suspicion, norms [n] in the case's dtype)."""
    case, wanted = answer.case, answer.steps[step]
    for name, ratio in ratios(case, step):
        yield f"norms are exactly {name} = {ratio:.6g} times the right ones", wanted.norms * ratio
    squares = {name: _squares(value) for name, value in wanted.gradients.items()}
    biases = [name for name in squares if name.endswith(".bias")]
    left_out = {name: [name] for name in squares} | ({"all biases": biases} if len(biases) > 1 else {})
    for name, names in left_out.items():
        rest = wanted.squared_norms - torch.stack([squares[each] for each in names]).sum(0)
        yield f"{name} is left out of the norm", rest.to(wanted.norms.dtype).sqrt()
    yield "squared norms stand in for norms", wanted.squared_norms.to(wanted.norms.dtype)
    mixed = _by_position(answer, step) if rank is not None else None
    if mixed is not None:
        yield _MIXED, mixed


def _squares(gradient: Tensor) -> Tensor:
    return gradient.flatten(1).square().sum(1)


def _by_position(answer: Answer, step: int) -> Tensor | None:
    """Norms [n] if squared norms of samples at equal positions of the ranks were added up; None where it cannot be."""
    case, wanted = answer.case, answer.steps[step]
    rows = _rows(case, step, wanted)
    if case.world_size == 1 or case.layout.kind == "replicated" or max(wanted.multiplicity, default=0) > 1:
        return None
    squared = wanted.squared_norms.clone()
    for position in range(max(len(own) for own in rows)):
        together = [own[position] for own in rows if position < len(own)]
        squared[together] = wanted.squared_norms[together].sum()
    return squared.to(wanted.norms.dtype).sqrt()


def _rows(case: Case, step: int, wanted: StepAnswer) -> list[list[int]]:
    """Per rank, the rows (places in ``wanted.samples``) of its samples in order."""
    place = {sample: row for row, sample in enumerate(wanted.samples)}
    return [[place[sample] for chunk in own for sample in chunk] for own in layouts.indices(case, step)]


def _of_order(case: Case, right: Tensor, wanted: StepAnswer, step: int, rank: int, got: Tensor) -> str:
    """Whether ``got`` are right values of other samples, or in another order."""
    rows = _rows(case, step, wanted)
    if len(set(right.tolist())) < 2:
        return ""
    if sorted(right[rows[rank]].tolist()) == sorted(got.tolist()):
        return "the values are right but permuted: samples are in another order (a missing reorder)"
    for other, own in enumerate(rows):
        if other != rank and torch.equal(right[own], got):
            return f"these are the values of rank {other}'s samples"
    return ""


def _which(case: Case, got: Tensor, suspected: Mapping[str, Tensor]) -> str:
    """The suspicions that give ``got`` up to rounding."""
    fitting = [
        name
        for name, value in suspected.items()
        if value.shape == got.shape
        and got.numel()
        and bool(((got.double() - value.double()).abs() <= _rounding(case, value)).all())
    ]
    return _named(fitting)


def _named(fitting: list[str]) -> str:
    """One suspicion, or two joined; "" for none or for more, which name nothing."""
    return " or ".join(fitting) if len(fitting) <= 2 else ""


def _of_places(case: Case, wanted: StepAnswer, got: Mapping[str, Tensor], right: Named) -> str:
    """A cause read off *where* values differ: parameters that stood still, biases only, the last shard only."""
    wrong = [name for name in right if bool((got[name] != right[name]).any())]
    if not wrong:
        return ""
    if right is wanted.after and all(bool((got[name] == wanted.before[name]).all()) for name in wrong):
        return f"{', '.join(wrong)} did not move at all"
    if right is not wanted.after and all(not bool(got[name].any()) for name in wrong):
        return f"{', '.join(wrong)} got no gradient"
    if all(_only_last_shard(got[name] != right[name], case.world_size) for name in wrong):
        return "only rows of the last, padded shard differ: padding"
    others = [name for name in wanted.used if not name.endswith(".bias")]
    if all(name.endswith(".bias") for name in wrong) and any(bool(wanted.used[name].any()) for name in others):
        return "only bias parameters differ"
    return ""


def _only_last_shard(different: Tensor, world: int) -> bool:
    """Whether W does not divide the rows, there are several shards, and only the last one's rows differ."""
    rows = different.shape[0]
    size = -(-rows // world)
    first = (rows - 1) // size * size
    return rows % world != 0 and first > 0 and not bool(different[:first].any())


def _row_shard(value: Tensor, rank: int, world: int) -> Tensor:
    """The rows of dim 0 that ``rank`` owns: blocks of ceil(rows / W)."""
    size = -(-value.shape[0] // world)
    return value[rank * size : (rank + 1) * size]


def _rounding(case: Case, value: Tensor) -> Tensor:
    """A few units in the last place of ``value``, in the case's dtype."""
    unit = 2.0**-53 if case.arithmetic.dtype == "float64" else 2.0**-24
    return value.double().abs() * (_CLOSE * unit)
