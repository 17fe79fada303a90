"""Checks of shards: which elements of which parameters the ranks hold between them.

Elements are known by their values, so nothing is asked of an implementation but the tensors that its optimizer updates:
real numbers are nearly all different, and where two are equal they are counted.

Legend: S ranks share the parameters of one replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch import Tensor

from fsdpcheck.checks._compare import alike, number
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.shape_matched_replay import trained_names
from fsdpcheck.errors import NotApplicable, UsageError
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program import probes
from fsdpcheck.workload import models
from fsdpcheck.workload.clip_groups import INSTRUMENT

Elements = Counter[float]
"""How often each value occurs."""


def assert_covered(execution: Execution, beside: bool = False) -> None:
    """In each replica every element of every trained parameter lies on exactly one rank; and replicas hold the same.

    After construction and after every step, as ``probes.local_tensors`` saw it. Besides, ranks may hold each frozen
    element once, and as many zeros as ``probes.padding`` showed padding. What no rank holds, or what one holds too
    often, is a violation; where in a shard an element lies is not looked at. ``beside``: the harness's layer was never
    given away, and lies whole on every rank. Raises NotApplicable where no padding is shown and all that is held beyond
    the elements may be padding: zeros, or values that no parameter has.
    """
    ranks = completed(execution)
    size = execution.request.training.mesh.dp_shard
    for first in range(0, len(ranks), size):
        replica = ranks[first : first + size]
        for moment, shown, held in _moments(execution, replica):
            where = f"{moment}, ranks {first} to {first + size - 1}"
            again = _elements([shown[INSTRUMENT]] * (size - 1) if beside else [])
            _require_once(execution, shown, held, again, _padding(replica), where)
    for result in ranks[size:]:
        _require_same(ranks[result.rank % size], result)


def _moments(
    execution: Execution, ranks: Sequence[RankResult]
) -> Iterator[tuple[str, Mapping[str, Tensor], list[list[Tensor]]]]:
    """(moment, parameters of the case or as the first rank showed them after a step, what each rank held)."""
    initial = models.initial_parameters(execution.request.training)
    seen = [_held(result) for result in ranks]
    for step, moment in seen[0]:
        shown = initial if step < 0 else ranks[0].steps[step].params
        words = "before the first step" if step < 0 else f"step {step}"
        yield words, shown, [own[step, moment] for own in seen]


def _held(result: RankResult) -> dict[tuple[int, str], list[Tensor]]:
    """What a rank held, by step and moment."""
    found = {(step, moment): value for moment, step, value in probes.local_tensors.saw(result)}
    if not found:
        raise UsageError(f"rank {result.rank} showed nothing that it holds; next: run with probes.local_tensors")
    return found


def _require_once(
    execution: Execution,
    shown: Mapping[str, Tensor],
    held: Sequence[Sequence[Tensor]],
    again: Elements,
    padding: int | None,
    where: str,
) -> None:
    names = trained_names(execution.request.training)
    wanted = _elements(shown[name] for name in names)
    frozen = _elements(value for name, value in shown.items() if name not in names)
    found = _elements(chain.from_iterable(held))
    if missing := wanted - found:
        value = next(iter(missing))
        raise Violation(
            "an element of a parameter lies on no rank",
            got=f"{wanted.total() - missing.total()} of {wanted.total()} elements",
            wanted="every element on one rank",
            where=f"{where}, {_place(value, shown)} = {number(value)}",
        )
    extra = found - wanted - frozen - again - Counter({0.0: padding or 0})
    if extra and padding is None and all(value == 0 or value not in wanted for value in extra):
        raise NotApplicable(
            f"{extra.total()} elements are held that may be padding: show it (Observed.shards, Features.observables),"
            " or leave it out of local_tensors"
        )
    if extra:
        value, whole = next(iter(extra)), all(_elements(own) >= wanted for own in held)
        raise Violation(
            "an element of a parameter lies on several ranks"
            if value in wanted
            else "a rank holds what no parameter has",
            got=f"{extra.total()} elements more than the {wanted.total()} there are",
            wanted="every element on one rank",
            where=f"{where}, {_place(value, shown)} = {number(value)}",
            cause="nothing is sharded: every rank holds whole parameters" if whole and len(held) > 1 else "",
        )


def _require_same(one: RankResult, other: RankResult) -> None:
    mine, theirs = _held(one), _held(other)
    for (step, moment), held in mine.items():
        again = theirs.get((step, moment), [])
        if len(held) != len(again) or not all(alike(a, b) for a, b in zip(held, again, strict=True)):
            raise Violation(
                "replicas hold different shards",
                got="other bits",
                wanted=f"those of rank {one.rank}",
                where=f"step {step}, {moment}, rank {other.rank}",
            )


def _elements(tensors: Iterator[Tensor] | Sequence[Tensor]) -> Elements:
    return Counter(value for tensor in tensors for value in tensor.flatten().tolist())


def _padding(ranks: Sequence[RankResult]) -> int | None:
    """How many elements of padding the ranks showed after construction; None if they show none at all."""
    seen = [value for result in ranks for moment, _, value in probes.padding.saw(result) if moment == "after_init"]
    return sum(padding.numel() for each in seen for padding in each.values()) if seen else None


def _place(value: float, shown: Mapping[str, Tensor]) -> str:
    """The first element that has a value, of the model's own parameters if one of them has it."""
    for name, tensor in sorted(shown.items(), key=lambda named: "instrument" in named[0]):
        if bool((tensor == value).any()):
            of_harness = " (the harness's own gauge layer, beside every model)" if "instrument" in name else ""
            return f"{name}{(tensor == value).nonzero()[0].tolist()}{of_harness}"
    return "no parameter"
