"""Causes of ranks that come apart: who left the common sequence of collectives, where, and what they have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import shards
from fsdpcheck.diagnosis.cause_fit import chunks
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.execution.matching import ranks_text
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.workload import batches

_Parting = tuple[int, list[int], Collective | None, list[int], Collective | None]
"""Place in the sequence; the ranks of one side and what they call there (None: nothing more); those of the other."""


_REDUCTIONS = ("reduce_scatter", "all_reduce")


def of_failure(execution: Execution) -> Causes | None:
    """Causes of a deadlock or mismatch; None for other failures, or where more than two sequences are called."""
    failure = execution.failure
    if failure is None or failure.kind not in ("deadlock", "mismatch", "unsafe"):
        return None
    parting = _parting(execution)
    if parting is None:
        return None
    place, some, theirs, others, common = parting
    found = list(_causes(execution, some, theirs, others, common, place))
    return found + list(_causes(execution, others, common, some, theirs, place))


def of_neighbours(
    first: TrainingCase, second: TrainingCase, mine: RankResult, theirs: RankResult, place: int
) -> Causes:
    """Causes of collective ``place`` of one rank, which is another in the runs of two neighbouring batches."""
    one, two = _aligned(mine, theirs, place)
    call = one or two
    if call is None:
        return []
    if not _follows_the_largest(first, second, _sizes(one, call), _sizes(two, call)):
        return []
    text = f"the size of what {call.op} sends is that of the largest local batch"
    none = "" if one and two else ", and of nothing there is no call"
    return [Cause("size of the largest local batch", f"{text}{none}: make it a public number")]


def _aligned(mine: RankResult, theirs: RankResult, place: int) -> tuple[Collective | None, Collective | None]:
    """The two calls at ``place`` if one stands for the other; one and None if only one run has it; else nothing."""
    one, two = mine.trace[place:], theirs.trace[place:]
    if one and two and _kind(one[0]) == _kind(two[0]):
        return one[0], two[0]
    if len(one) > len(two) and [*map(_label, one[1:2])] == [*map(_label, two[:1])]:
        return one[0], None
    if len(two) > len(one) and [*map(_label, two[1:2])] == [*map(_label, one[:1])]:
        return None, two[0]
    return None, None


def _kind(call: Collective) -> object:
    return call.op, call.subject, call.group


def _sizes(call: Collective | None, like: Collective) -> list[int]:
    """All extents of what a call takes and gives; 0 for each of ``like``'s if there is no call."""
    shapes = [size for _, shape in (*like.inputs, *like.outputs) for size in shape]
    return [0] * len(shapes) if call is None else [s for _, shape in (*call.inputs, *call.outputs) for s in shape]


def _follows_the_largest(first: TrainingCase, second: TrainingCase, one: list[int], two: list[int]) -> bool:
    """Whether the largest local batch of a step has, up to one factor, the size of what is sent in each case."""
    changed = [(a, b) for a, b in zip(one, two, strict=False) if a != b]
    for step in range(first.step.steps if changed else 0):
        a, b = (max(sum(map(len, own)) for own in batches.indices(case, step)) for case in (first, second))
        if a != b and all(x * b == y * a for x, y in changed):
            return True
    return False


def _parting(execution: Execution) -> _Parting | None:
    """The first place at which members of one group call different things, if they are of two kinds."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    for result in execution.ranks:
        for call in result.trace:
            groups[call.group_name, call.group].setdefault(result.rank, []).append(call)
    for (_, members), calls in groups.items():
        sequences = {rank: calls.get(rank, []) for rank in members}
        for place in range(max(map(len, sequences.values()))):
            sides: dict[object, list[int]] = defaultdict(list)
            for rank, own in sequences.items():
                sides[_label(own[place]) if place < len(own) else None].append(rank)
            if len(sides) == 2:
                first, second = sides.values()
                return place, first, _at(sequences, first, place), second, _at(sequences, second, place)
            if len(sides) > 2:
                return None
    return None


def _causes(
    execution: Execution,
    odd: list[int],
    theirs: Collective | None,
    others: list[int],
    common: Collective | None,
    place: int,
) -> Iterator[Cause]:
    """What singles out ``odd`` among the ranks."""
    case = execution.request.training
    how = _how(execution, odd, theirs, others, common, place)
    fewer = {rank for rank in range(case.world_size) if case.has_fewer(rank)}
    if _alone(odd, others, [fewer]):
        text = f"ranks part where some have run out of micro-batches: {ranks_text(odd)}, with one fewer, {how}"
        yield Cause("fewer micro-batches", text)
    last = case.step.micro_batches - 1
    for chunk in range(case.step.micro_batches):
        empty = [rank for rank, own in enumerate(batches.indices(case, 0)) if not own[chunk]]
        empty = [rank for rank in empty if chunk != last or rank not in fewer]  # which it is not given
        if empty and set(empty).intersection(odd + others) == set(odd):
            text = f"the collectives depend on whether a rank has samples: {ranks_text(odd)}, without a sample, {how}"
            yield Cause("rank without samples", text)
            break
    if common is not None and common.op in _REDUCTIONS and _alone(odd, others, _without_gradient(case, common.subject)):
        unit = common.subject
        text = f"a unit without gradient is not reduced: {ranks_text(odd)}, where all gradients of {unit} are 0, {how}"
        yield Cause("rank without gradient", text)
    if len(odd) == 1:
        yield from _of_one(odd[0], others, theirs, common, how)


def _alone(odd: list[int], others: list[int], zero: list[set[int]]) -> bool:
    """Whether exactly ``odd`` of the ranks of a group are among ``zero``, in some step or micro-batch."""
    return any(set(odd) == ranks.intersection(odd + others) for ranks in zero)


def _of_one(
    rank: int, others: list[int], theirs: Collective | None, common: Collective | None, how: str
) -> Iterator[Cause]:
    """``rank`` left the calls of ``others``, the rest of its group: does it stand at an end of the group?"""
    if theirs is not None and common is not None and theirs.op == common.op:
        sizes = [[shape for _, shape in (call.inputs or call.outputs)] for call in (theirs, common)]
        if theirs.subject == common.subject and sizes[0] != sizes[1]:
            given, wanted = (", ".join(str(list(shape)) for shape in own) for own in sizes)
            how = f"{how}: with {given} in place of {wanted}: parts of other sizes, which are to be padded, or"
            how = f"{how} the same collectives in another order"
        else:
            how = f"{how}: the same collectives in another order"
    elif common is None:
        how = f"{how}: a collective under a condition on the rank"
    for key, end in (("the first rank", min), ("the last rank", max)):
        if rank == end(rank, *others):
            who = "rank 0" if rank == 0 else f"{key} ({rank})"
            yield Cause(f"{key} alone", f"{who} alone {how}")


def _how(
    execution: Execution,
    odd: list[int],
    theirs: Collective | None,
    others: list[int],
    common: Collective | None,
    place: int,
) -> str:
    failure = execution.failure
    where = {state.rank: state.where for state in failure.ranks if state.where} if failure is not None else {}
    at = f" at {where[odd[0]]}" if where.get(odd[0]) else ""
    return f"{_named(theirs, len(odd))}{at} as call {place}, where {ranks_text(others)} {_named(common, len(others))}"


def _named(call: Collective | None, count: int) -> str:
    if call is None:
        return "makes no further call" if count == 1 else "make no further call"
    return f"{'calls' if count == 1 else 'call'} {call.op}" + (f" of {call.subject}" if call.subject else "")


def _label(call: Collective) -> object:
    return (*call.fingerprint, call.subject)


def _at(sequences: dict[int, list[Collective]], ranks: Sequence[int], place: int) -> Collective | None:
    own = sequences[ranks[0]]
    return own[place] if place < len(own) else None


def _without_gradient(case: TrainingCase, unit: str) -> list[set[int]]:
    """Ranks whose own gradient of a unit vanishes, in each step and in each micro-batch."""
    try:
        answer = oracle.answer(case)
    except FsdpcheckError:
        return []
    names = shards.units(case, list(answer.trainable)).get(unit, [])
    if not names:
        return []
    found = []
    for step, wanted in enumerate(answer.steps):
        everyone = chunks(case, step, wanted)
        times = [[row for chunk in own for row in chunk] for own in everyone]
        for chosen in (times, *([own[i] for own in everyone] for i in range(case.step.micro_batches))):
            zero = {
                rank
                for rank, own in enumerate(chosen)
                if not any(bool(wanted.gradients[n][own].sum(0).any()) for n in names if own)
            }
            found.append(zero)
    return found
