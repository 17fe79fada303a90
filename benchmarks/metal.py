"""Real ranks: from the last move to the report, from a lost rank to the next case, and a pool against mp.spawn.

A row a program of ``tests/engines/adapters_for_tests.py`` and number of ranks, on processes and under torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.engines import fixed_cases
from benchmarks.paired import paired
from benchmarks.peers import SpawnEngine
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.execution import RunRequest
from fsdpcheck.processes import fork_server

_TESTS: Final = Path(__file__).parents[1] / "tests" / "engines"
_HANGS: Final = (
    "late_alone", "crossed", "one_sided", "waits_for_a_message", "makes_a_group_alone",
    "other_op", "other_shape", "other_root",
)  # fmt: skip
"""A collective that one rank leaves out, two groups crossed, a call too many, a message that nobody sends, a group that
one member does not make; and calls that disagree."""
_LOST: Final = ("killed", "segfaults", "leaves")
_SIZES: Final = (2, 4)


def lines() -> Iterator[str]:
    """All rows."""
    fork_server.fork()
    engine = ProcessesEngine()
    for size in _SIZES:
        yield from on_processes(engine, size)
    engine.close()
    for size in _SIZES:
        yield from _under_torchrun(size)
    yield from _against_spawn()


def _request(name: str, size: int) -> RunRequest:
    case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(size), BatchLayout("contiguous", size))
    return RunRequest(case, f"{_TESTS / 'adapters_for_tests.py'}:{name}")


def on_processes(engine: Engine, size: int) -> Iterator[str]:
    honest = _request("honest", size)
    engine.run(honest)
    for name in (*_HANGS, *_LOST):
        failure = engine.run(_request(name, size)).failure
        over = time.monotonic()
        assert failure is not None, name
        assert engine.run(honest).failure is None
        again = time.monotonic() - over
        yield _row("processes", size, name, failure.kind, failure.seconds, again)


def _row(engine: str, size: int, name: str, kind: str, seconds: float | None, again: float | None = None) -> str:
    told = "" if seconds is None else f"; last move to report {seconds * 1e3:.1f} ms"
    told += "" if again is None else f"; the next case has run {again:.2f} s later"
    return f"{engine}, W = {size}, {name}: {kind}{told}"


def _under_torchrun(size: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        names = [*_HANGS, *_LOST, "honest"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([*launch, str(_TESTS / "torchrun_program.py"), str(told), *names], check=True, env=environment)
        found = json.loads(told.read_text())
    assert found["kinds"][-1] == [1] * size, "the last case ran"
    for name, kind, seconds in zip(names[:-1], found["kinds"], found["seconds"], strict=False):
        yield _row("torchrun", size, name, kind, seconds)


def _against_spawn() -> Iterator[str]:
    for size in _SIZES:
        pool, spawn = ProcessesEngine(), SpawnEngine()
        request = RunRequest(fixed_cases(size)[0], "reference")
        assert pool.run(request).failure is None
        arms = partial(pool.run, request), partial(spawn.run, request)
        yield str(paired(f"a pool of processes, W = {size}, 1 case: mp.spawn gloo", *arms, ">= 100", pairs=3))
        pool.close()
