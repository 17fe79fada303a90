"""Flight-Recorder dumps of simulated ranks, in the format that torch's own recorder writes and its analyser reads.

A dump is the pickle of a dict, one file a rank (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2.10, as
torch 2.13 writes it). What a simulation has no number for is 0; times are those of trace.Times.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.execution.matching import ANY_SOURCE
from fsdpcheck.execution.trace import Collective
from fsdpcheck.traces.job import Job, completions

VERSION: Final = "2.10"
PREFIX: Final = "comm_lib_trace_rank_"
"""What torch calls its files, before the rank."""

RECORDER: Final = "fsdpcheck"
"""What stands where torch puts the version of the library that communicates."""

DTYPES: Final = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half",
    "float32": "Float", "float64": "Double", "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "bool": "Bool", "bfloat16": "BFloat16", "uint16": "UInt16", "uint32": "UInt32",
    "uint64": "UInt64", "float8_e5m2": "Float8_e5m2", "float8_e4m3fn": "Float8_e4m3fn",
}  # fmt: skip
"""torch's name of a dtype -> that of c10."""

_TITLES: Final = {"monitored_barrier": "barrier"}
"""What torch's recorder has no name for."""

_OWN: Final = (("", ()),)
"""What differs between members by right, and so is not recorded."""

_Shape = tuple[int, ...]
_Tensors = Sequence[tuple[str, _Shape]]


def write(job: Job, folder: Path) -> None:
    """One file a rank, into a folder that is there."""
    members, ends = _members(job), completions(job)
    for rank in job.traces:
        dump = _dump(job, rank, members, ends[rank])
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def _members(job: Job) -> dict[str, dict[_Shape, None]]:
    """Of each name of a group, the ranks of the groups that have it; of one that only sent messages, who took part."""
    found: dict[str, dict[_Shape, None]] = defaultdict(dict)
    messages: dict[str, set[int]] = defaultdict(set)
    for trace in job.traces.values():
        for call in trace:
            if call.tag is None:
                found[call.group_name][call.group] = None
            else:
                messages[call.group_name] |= set(call.group)
    for name, ranks in messages.items():
        found[name] = found[name] or {tuple(sorted(ranks)): None}
    return found


def _dump(job: Job, rank: int, members: dict[str, dict[_Shape, None]], ends: Sequence[int | None]) -> dict[str, Any]:
    own = {name: ranks for name, those in members.items() for ranks in those if rank in ranks}
    entries = list(_entries(job, rank, own, ends))
    status = {}
    for entry in entries:
        status[str(entry["pg_id"])] = {
            "last_enqueued_collective": entry["collective_seq_id"],
            "last_started_collective": -1,
            "last_completed_collective": entry["collective_seq_id"] if entry["retired"] else -1,
        }
    return {
        "version": VERSION,
        "pg_config": {
            name: {"name": name, "desc": "undefined", "ranks": str(list(ranks))} for name, ranks in own.items()
        },
        "comm_lib_version": f"{RECORDER} {__version__}",
        "pg_status": status,
        "entries": entries,
    }


def _entries(job: Job, rank: int, own: dict[str, _Shape], ends: Sequence[int | None]) -> Iterator[dict[str, Any]]:
    collectives: dict[str, int] = defaultdict(int)
    messages: dict[str, int] = defaultdict(int)
    numbers = {name: place for place, name in enumerate(own)}
    for place, (call, moments, end) in enumerate(zip(job.traces[rank], job.times[rank], ends, strict=True)):
        if call.op == ANY_SOURCE:  # still without a source, for which the format has no place
            continue
        name = call.group_name
        (collectives if call.tag is None else messages)[name] += 1
        ranks = own[name] if set(call.group) <= set(own[name]) else call.group  # of a name that was used again
        inputs, outputs = _tensors(call, len(ranks))
        yield {
            "frames": _frames(call.where),
            "record_id": place,
            "pg_id": numbers[name],
            "process_group": (name, "undefined"),
            "thread_name": f"rank {rank}",
            "thread_id": "0",
            "collective_seq_id": collectives[name],
            "p2p_seq_id": messages[name],
            "op_id": collectives[name] + messages[name],
            "profiling_name": _title(call, ranks),
            "time_created_ns": moments[0],
            "input_sizes": [list(shape) for _, shape in inputs],
            "input_dtypes": [DTYPES.get(dtype, dtype) for dtype, _ in inputs],
            "output_sizes": [list(shape) for _, shape in outputs],
            "output_dtypes": [DTYPES.get(dtype, dtype) for dtype, _ in outputs],
            "state": "scheduled" if end is None else "completed",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": end,
            "retired": end is not None,
            "timeout_ms": 0,
            "is_p2p": call.tag is not None,
        }


def _title(call: Collective, ranks: _Shape) -> str:
    """gloo is the backend whose calls a rank waits for as a simulated one does."""
    if call.tag is None:
        return f"gloo:{_TITLES.get(call.op, call.op)}{'_v' if _is_uneven(call) else ''}"
    source, destination = (ranks.index(rank) for rank in call.group)
    return f"gloo:send {source}->{destination}" if call.op == "send" else f"gloo:recv {destination}<-{source}"


def _tensors(call: Collective, size: int) -> tuple[_Tensors, _Tensors]:
    """Inputs and outputs as torch records them: what belongs to all members is one tensor; a message is both."""
    inputs, outputs = call.inputs, call.outputs
    if call.tag is not None:
        return inputs or outputs, outputs or inputs
    if call.op == "all_gather":
        return inputs or _OWN, _whole(outputs, size)
    if call.op == "reduce_scatter":
        return _whole(inputs, size), outputs or _OWN
    if call.op == "all_to_all":
        return _OWN, _OWN
    return inputs, outputs


def _is_uneven(call: Collective) -> bool:
    return (call.op, ()) in (("all_gather", call.inputs), ("reduce_scatter", call.outputs))


def _whole(parts: _Tensors, size: int) -> _Tensors:
    rows = [parts[place : place + size] for place in range(0, len(parts), size)]
    return [(row[0][0], (sum(math.prod(shape) for _, shape in row),)) for row in rows]


def _frames(where: str) -> list[dict[str, Any]]:
    file, _, line = where.rpartition(":")
    return [{"name": "(caller)", "filename": file, "line": int(line)}] if line.isdecimal() else []
