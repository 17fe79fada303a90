"""A program on real ranks, as ``torchrun --standalone --nproc-per-node W`` has it; no process imports torch anew.

Each is forked from one that has it imported; the store is of this process, as torchrun's is its agent's. ``torchrun``
itself has tests/engines/test_torchrun.py and tests/cli/test_run.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from fsdpcheck.processes import zygote

_LOOPBACK: Final = "127.0.0.1"
_RANK: Final = """import json, os, runpy, sys
written, environment, program = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
for standard in (1, 2):
    os.dup2(written, standard)
os.environ |= environment
sys.path.insert(0, os.path.dirname(program))
sys.argv[:] = sys.argv[3:]
runpy.run_path(program, run_name="__main__")"""


@dataclass(frozen=True)
class Ran:
    """1 if a rank ended otherwise than with 0, and what all of them have printed, rank by rank."""

    code: int
    printed: str


def launched(program: Path, world_size: int, *arguments: str) -> Ran:
    """The program on as many processes as there are ranks. Once one has failed, the others are ended."""
    from torch.distributed import TCPStore

    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    files = [TemporaryFile("w+", encoding="utf-8") for _ in range(world_size)]  # noqa: SIM115 - closed below
    ranks: list[zygote.Process] = []
    try:
        for rank, file in enumerate(files):
            environment: Mapping[str, str] = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = [str(file.fileno()), json.dumps(environment), str(program), *arguments]
            ranks.append(zygote.start(_RANK, given, [file.fileno()], f"{os.getpid()}.ranks"))
        code = _waited(ranks)
    finally:  # after an interrupt too
        for process in ranks:
            process.kill()
    printed = ""
    for file in files:
        file.seek(0)
        printed += file.read()
        file.close()
    return Ran(code, printed)


def _waited(ranks: list[zygote.Process]) -> int:
    """1 if one of them has failed."""
    ends = {os.pidfd_open(rank.pid): rank for rank in ranks}
    code = 0
    while ends:
        for end in connection.wait(list(ends)):
            assert isinstance(end, int)
            rank = ends.pop(end)
            os.close(end)
            if rank.wait() != 0:
                code = 1
                for other in ends.values():
                    other.kill()
    return code
