"""Flight-Recorder dumps written by hand, as torch 2.13 writes them on NCCL, and real ones of gloo."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpcheck.processes import zygote

Entry = dict[str, Any]


def entry(title: str, number: int = 0, *, group: str = "0", line: int = 0, **more: Any) -> Entry:
    """One record; ``dump`` numbers it. ``number``: collective_seq_id."""
    frames = [
        {"name": "all_reduce", "filename": "/opt/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
        {"name": "step", "filename": "/home/user/train.py", "line": line},
    ]
    return {
        "frames": frames if line else frames[:1],
        "pg_id": 0,
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": title,
        "time_created_ns": 0,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def message(way: str, batch: int, **more: Any) -> Entry:
    """One side of a message; "0->1" is sent and "1<-0" received."""
    return entry(f"nccl:{'send' if '>' in way else 'recv'} {way}", 0, p2p_seq_id=batch, is_p2p=True, **more)


def dump(
    entries: Sequence[Entry], groups: dict[str, Sequence[int]], first: int = 0, version: str = "2.10"
) -> dict[str, Any]:
    """A dump whose records are numbered from ``first``."""
    return {
        "version": version,
        "pg_config": {
            name: {"name": name, "desc": "default_pg" if name == "0" else "undefined", "ranks": str(list(ranks))}
            for name, ranks in groups.items()
        },
        "comm_lib_version": "2.27.3",
        "pg_status": {},
        "entries": [{"record_id": first + place, **known} for place, known in enumerate(entries)],
    }


def write(folder: Path, dumps: dict[int, dict[str, Any]], as_json: bool = False) -> Path:
    """Files of the dumps by rank, into a folder that is made."""
    folder.mkdir(exist_ok=True)
    for rank, found in dumps.items():
        if as_json:
            without = [{name: value for name, value in known.items() if name != "frames"} for known in found["entries"]]
            (folder / f"rank_{rank}.json").write_text(json.dumps({**found, "entries": without}))
        else:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(found, protocol=2))
    return folder


_GLOO = """
import datetime, json, os, sys, threading
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = dist.FileStore(folder + "/store", size)
minute = datetime.timedelta(minutes=1)  # ends a rank for which this program is wrong
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=minute)

def recorded():
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])

def dump_and_leave(done):
    while not done(recorded()):  # what it waits for comes: this rank's own calls, recorded when they are made
        pass
    with open(f"{folder}/pickles/trace_rank_{rank}", "wb") as file:
        file.write(c10d._dump_fr_trace())
    with open(f"{folder}/json/rank_{rank}.json", "wb") as file:
        file.write(c10d._dump_fr_trace_json())
    store.set(f"dumped {rank}", "")
    store.wait([f"dumped {other}" for other in range(size)])
    os._exit(0)

def whole():
    dump_and_leave(lambda entries: all(entry["retired"] for entry in entries))

watching = []

def stuck_in(number):
    is_there = lambda entries: len(entries) == number and [entry["retired"] for entry in entries[-2:]] == [True, False]
    watching.append(threading.Thread(target=dump_and_leave, args=(is_there,), daemon=True))
    watching[0].start()

with open(sys.argv[4]) as file:
    source = file.read()
try:
    exec(compile(source, sys.argv[4], "exec"))
except RuntimeError:  # of a call that never ends, because its peer has dumped and left
    for thread in watching:
        thread.join()  # which leaves
    raise
"""


def of_gloo(folder: Path, program: str, size: int = 2) -> Path:
    """The folder with folders "pickles" and "json" of dumps of real gloo ranks.

    ``program`` sees rank, size and dist. It ends by ``whole()``, when all its calls have ended, or calls
    ``stuck_in(number)`` before the call that never ends, its number from 1.
    """
    for name in ("pickles", "json"):
        (folder / name).mkdir()
    (file := folder / "program.py").write_text(program)
    ranks = [
        zygote.start(_GLOO, [str(folder), str(rank), str(size), str(file)], [], f"{os.getpid()}.gloo")
        for rank in range(size)
    ]
    assert [rank.wait() for rank in ranks] == [0] * size
    return folder
