"""A call and a failure as JSON data, in every file that fsdpcheck writes, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fsdpcheck.errors import reading
from fsdpcheck.execution import Failure, FailureKind, RankState
from fsdpcheck.execution.matching import ANY_SOURCE
from fsdpcheck.execution.trace import Collective


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    op: str
    group: str
    ranks: tuple[int, ...]
    number: int
    reduce_op: str
    root: int
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]
    asynchronous: bool
    subject: str
    tag: int | None
    about: str
    phase: str
    where: str
    times: tuple[int, ...]
    called_at: str = ""
    """Files of earlier versions have none."""


_TENSORS: Final = ("inputs", "outputs")
_OTHERWISE: Final = {"group": "group_name", "ranks": "group", "number": "sequence"}
_FIELDS: Final = {
    field.name: _OTHERWISE.get(field.name, field.name) for field in dataclasses.fields(_Call) if field.name != "times"
}
"""What a field is called in JSON -> in Collective."""


@dataclass(frozen=True)
class _Rank:
    rank: int
    state: str
    waiting_for: str
    where: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class _Failure:
    kind: FailureKind
    text: str
    exception: str
    ranks: tuple[_Rank, ...]


def of_call(call: Collective, times: Sequence[int]) -> dict[str, Any]:
    """A call and its moments (trace.Times) as JSON data."""
    known = {ours: getattr(call, theirs) for ours, theirs in _FIELDS.items()}
    for name in _TENSORS:
        known[name] = tuple(_Tensor(*tensor) for tensor in known[name])
    return dataclasses.asdict(_Call(**known, times=tuple(times)))


def call(data: Any, where: str) -> tuple[Collective, tuple[int, ...]]:
    """The inverse of ``of_call``. Raises reading.Unreadable, which names the place ``where`` something is missing."""
    read: _Call = reading.typed(_Call, data, where)
    of_message = read.tag is not None and read.op != ANY_SOURCE
    if len(read.times) not in (1, 2, 3) or not read.ranks or (of_message and len(read.ranks) != 2):
        raise reading.Unreadable(f"{where} has {len(read.times)} times and {len(read.ranks)} ranks")
    known = {theirs: getattr(read, ours) for ours, theirs in _FIELDS.items()}
    for name in _TENSORS:
        known[name] = tuple((tensor.dtype, tensor.shape) for tensor in known[name])
    return Collective(**known), read.times


def of_failure(failure: Failure | None) -> dict[str, Any] | None:
    """A failure as JSON data."""
    if failure is None:
        return None
    ranks = tuple(_Rank(**dataclasses.asdict(state)) for state in failure.ranks)
    return dataclasses.asdict(_Failure(failure.kind, failure.text, failure.exception, ranks))


def failure(data: Any, where: str) -> Failure | None:
    """The inverse of ``of_failure``. Raises reading.Unreadable."""
    if data is None:
        return None
    known: _Failure = reading.typed(_Failure, data, where)
    ranks = tuple(RankState(**dataclasses.asdict(rank)) for rank in known.ranks)
    return Failure(known.kind, known.text, ranks, known.exception)
