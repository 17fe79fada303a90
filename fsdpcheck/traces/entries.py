"""One rank's Flight-Recorder dump, of whatever torch 2.x wrote it, checked field by field and without torch's habits.

Its format: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, versions 2.1 to 2.10. A dump as JSON has no frames.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fsdpcheck.compat import frames_private
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.traces.flight_recorder import DTYPES, RECORDER

Tensors = tuple[tuple[str, tuple[int, ...]], ...]

GLOO: Final = "gloo"
_TITLE: Final = re.compile(r"(\w+):(\S+)(?: (\d+)(->|<-)(\d+))?$")
_OPS: Final = {
    "_broadcast_oop": "broadcast", "_reduce_oop": "reduce", "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier", "all_to_all_single": "all_to_all", "all_to_all_v_single": "all_to_all",
    **dict.fromkeys(
        ("_all_gather_base", "all_gather_single", "all_gather_v", "all_gather_into_tensor_coalesced",
         "ALLGATHER_coalesced"), "all_gather",
    ),
    **dict.fromkeys(
        ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_v", "reduce_scatter_tensor_coalesced",
         "REDUCE_SCATTER_coalesced"), "reduce_scatter",
    ),
}  # fmt: skip
"""What torch calls an operation -> its canonical name, where they differ."""
_NAMES: Final = {theirs: ours for ours, theirs in DTYPES.items()}
_LIBRARY: Final = re.compile(
    r"[/\\]torch[/\\](_\w+|distributed|nn|autograd|utils|optim|csrc|testing)\b|^<|^\?|\.(cpp|h|so)$"
)
"""Files of torch, wherever it was installed, and what has no file."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded call. ``number``: torch's, of collectives of the group, from 1.

    ``batch``: torch's number of messages, which those of one batch share. ``way``: of a message, source and destination
    by their rank in the group. ``done``: it came to its end; on gloo also where it failed, which its recorder does not
    tell apart. ``ends``: it stands for the calls before it that were launched as one.
    """

    record: int
    backend: str
    group: str
    description: str
    op: str
    number: int
    batch: int
    is_message: bool
    way: tuple[int, int] | None
    inputs: Tensors
    outputs: Tensors
    done: bool
    ends: bool
    where: str


@dataclass(frozen=True)
class Dump:
    """What one rank's recorder held. ``groups``: the ranks of those that it says, by name and place in them.

    ``is_simulated``: fsdpcheck wrote it.
    """

    rank: int
    is_simulated: bool
    entries: Sequence[Entry]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def is_cut(self) -> bool:
        """Whether calls before its first have been dropped from the ring buffer."""
        return bool(self.entries) and self.entries[0].record > 0


def dump(rank: int, data: Any) -> Dump:
    """What the file of a rank holds. Raises Unreadable, which names the first place that is not as torch writes it."""
    whole = _is(dict, data, "it")
    version = _of(str, whole, "version", "it")
    if not re.fullmatch(r"2\.\d+", version):
        raise Unreadable(f"its version is {version[:20]!r}, wanted 2.x")
    entries = [_entry(entry, f"entries[{place}]") for place, entry in enumerate(_of(list, whole, "entries", "it", []))]
    is_simulated = _of(str, whole, "comm_lib_version", "it", "").startswith(RECORDER)
    return Dump(rank, is_simulated, entries, _groups(_of(dict, whole, "pg_config", "it", {})))


def _groups(config: dict[Any, Any]) -> dict[str, tuple[int, ...]]:
    """The groups that have a name and members; gloo's recorder names one without either."""
    found = {}
    for name, known in config.items():
        where = f"pg_config[{str(name)[:20]!r}]"
        ranks = re.findall(r"\d+", _of(str, _is(dict, known, where), "ranks", where))
        if ranks:
            found[_is(str, name, where)] = tuple(map(int, ranks))
    return found


def _entry(data: Any, where: str) -> Entry:
    entry = _is(dict, data, where)
    title = _of(str, entry, "profiling_name", where)
    parts = _TITLE.match(title)
    if parts is None:
        raise Unreadable(f"{where}.profiling_name is {title[:40]!r}, wanted backend:operation")
    backend, name, one, arrow, other = parts.groups()
    state, retired = _of(str, entry, "state", where), _of(bool, entry, "retired", where, False)
    group = _of((list, tuple), entry, "process_group", where)
    if len(group) != 2 or not all(isinstance(part, str) for part in group):
        raise Unreadable(f"{where}.process_group is {str(group)[:40]}, wanted a name and a description")
    inputs, outputs = (_tensors(entry, kind, where) for kind in ("input", "output"))
    return Entry(
        _of(int, entry, "record_id", where),
        backend,
        group[0],
        group[1],
        _OPS.get(name, name),
        _of(int, entry, "collective_seq_id", where),
        _of(int, entry, "p2p_seq_id", where, 0),
        _of(bool, entry, "is_p2p", where, arrow is not None),
        None if arrow is None else (int(one), int(other)) if arrow == "->" else (int(other), int(one)),
        inputs,
        outputs,
        state == "completed" or (backend == GLOO and retired),
        name.endswith("coalesced") and not inputs,
        _line(_of(list, entry, "frames", where, []), where),
    )


def _tensors(entry: dict[str, Any], kind: str, where: str) -> Tensors:
    shapes = _of((list, tuple), entry, f"{kind}_sizes", where)
    dtypes = _of((list, tuple), entry, f"{kind}_dtypes", where, [""] * len(shapes))
    if len(dtypes) != len(shapes):
        raise Unreadable(f"{where} has {len(shapes)} {kind}_sizes and {len(dtypes)} {kind}_dtypes")
    found = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if not isinstance(dtype, str) or not all(type(size) is int for size in _is((list, tuple), shape, where)):
            raise Unreadable(f"{where} has a tensor that is none: {str(dtype)[:20]} {str(shape)[:40]}")
        found.append((_NAMES.get(dtype, dtype), tuple(shape)))
    return tuple(found)


def _line(frames: list[Any], where: str) -> str:
    """The innermost frame outside torch."""
    for frame in frames:
        known = _is(dict, frame, f"{where}.frames")
        file = _of(str, known, "filename", f"{where}.frames")
        if not _is_library(file):
            return f"{file}:{_of(int, known, 'line', f'{where}.frames')}"
    return ""


@functools.lru_cache(maxsize=1024)
def _is_library(file: str) -> bool:
    return bool(_LIBRARY.search(file)) or frames_private.is_plumbing(file)


def in_parts(entry: Entry, size: int) -> tuple[Tensors, Tensors]:
    """Inputs and outputs with what belongs to all members as a tensor each: how else it was packed says nothing."""
    if entry.op == "all_gather":
        return entry.inputs, _parts(entry.outputs, entry.inputs, size)
    if entry.op == "reduce_scatter":
        return _parts(entry.inputs, entry.outputs, size), entry.outputs
    return entry.inputs, entry.outputs


def _parts(larges: Tensors, smalls: Tensors, size: int) -> Tensors:
    pairs = list(zip(larges, smalls, strict=False))
    if len(larges) != len(smalls) or any(math.prod(large[1]) != size * math.prod(small[1]) for large, small in pairs):
        return larges
    return tuple((large[0], small[1]) for large, small in pairs for _ in range(size))


def _of(
    kind: type[_T] | tuple[type, ...], data: Mapping[str, Any], name: str, where: str, default: _T | None = None
) -> Any:
    if name not in data and default is not None:
        return default
    if name not in data:
        raise Unreadable(f"{where} has no {name!r}")
    return _is(kind, data[name], f"{where}.{name}")


def _is(kind: type[_T] | tuple[type, ...], found: Any, where: str) -> Any:
    if not isinstance(found, kind) or (kind is int and type(found) is not int):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(one.__name__ for one in kinds)
        raise Unreadable(f"{where} is a value of type {type(found).__name__}, wanted {wanted}")
    return found
