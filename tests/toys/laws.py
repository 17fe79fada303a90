"""Toy laws, named by ``--laws laws.py`` on the command line; each ends in another way."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import BuiltSpace


def draw(features: Features, world_sizes: tuple[int, ...]) -> st.SearchStrategy[TrainingCase]:
    return st.builds(
        lambda world, batch, seed: TrainingCase(
            model=ModelSpec(layers=(LayerSpec(width=2),)),
            mesh=MeshSpec(dp_shard=world),
            layout=BatchLayout(batch_size=batch),
            arithmetic=Arithmetic(project=False),
            seed=seed,
        ),
        st.sampled_from(world_sizes),
        st.integers(1, 8),
        st.integers(0, 1000),
    )


SPACE = BuiltSpace(build=draw)


@law("toy.completes", promise="plain", space=SPACE)
def completes(case: TrainingCase, run: Run) -> None:
    """Every step comes to its end."""
    assert run(case).failure is None


@law("toy.agrees", promise="plain", space=SPACE)
def agrees(case: TrainingCase, run: Run) -> None:
    """All ranks show the same parameters."""
    first, *others = run(case).ranks
    for other in others:
        for name, value in first.steps[0].params.items():
            if not torch.equal(value, other.steps[0].params[name]):
                where = f"parameter {name}, ranks 0 and {other.rank}"
                raise Violation("two ranks disagree", got=str(other.rank), wanted="the same", where=where)


@law("toy.worlds", promise="plain", space=SPACE)
def worlds(case: TrainingCase, run: Run) -> None:
    """A step comes to its end on one more rank too."""
    for size in (case.world_size, case.world_size + 1):
        assert run(replace(case, mesh=MeshSpec(dp_shard=size))).failure is None


@law("toy.small", promise="plain", space=SPACE)
def small(case: TrainingCase, run: Run) -> None:
    """No batch is larger than three samples."""
    if case.layout.batch_size > 3:
        got = str(case.layout.batch_size)
        raise Violation("the batch is too large", got=got, wanted="at most 3", where="the layout", cause="its size")


@law("toy.crashes", promise="plain", space=SPACE)
def crashes(case: TrainingCase, run: Run) -> None:
    """The process stays alive."""
    if case.layout.batch_size > 3:
        ctypes.string_at(0)


@law("toy.secret", promise="private", space=SPACE)
def secret(case: TrainingCase, run: Run) -> None:
    """Never asked of the toy."""
    raise AssertionError("a law that is not promised was run")


@law("toy.simulated", promise="plain", space=SPACE)
def simulated(case: TrainingCase, run: Run) -> None:
    """Breaks on simulated ranks alone, as nothing real does."""
    if run(case).engine == "simulated":
        raise Violation("an artefact", got="simulated", wanted="real", where="the engine")


@law("toy.broken", promise="plain", space=SPACE)
def broken(case: TrainingCase, run: Run) -> None:
    """The law itself has a bug."""
    raise ZeroDivisionError("a bug of the law")


@law("toy.keeps", promise="plain", space=SPACE)
def keeps(case: TrainingCase, run: Run) -> None:
    """One thread sleeps in C code and lets no Python run; the main thread asks for the interpreter again and again."""
    keeper = threading.Thread(target=ctypes.PyDLL(None).pause)
    keeper.start()
    keeper.join()


@law("toy.waits", promise="plain", space=SPACE)
def waits(case: TrainingCase, run: Run) -> None:
    """Never ends by itself."""
    threading.Event().wait()


@law("toy.litters", promise="plain", space=SPACE)
def litters(case: TrainingCase, run: Run) -> None:
    """Leaves a thread and two processes that never end, one of them in a session of its own; their ids are noted."""
    note = Path(os.environ["TOY_LITTER"])
    if note.exists():
        return
    threading.Thread(target=threading.Event().wait, daemon=False).start()
    ready, tell = os.pipe()
    for left in ("child", "grandchild"):
        if os.fork() == 0:
            if left == "grandchild" and os.fork() == 0:
                os.setsid()
            os.write(tell, f"{os.getpid()} ".encode())
            while True:
                signal.pause()
    told = b""
    while told.count(b" ") < 3:
        told += os.read(ready, 100)
    note.write_bytes(told)


class _Interrupted:
    """A Ctrl-C that comes while Python runs a callback of its own, which swallows what it raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@law("toy.swallows", promise="plain", space=SPACE)
def swallows(case: TrainingCase, run: Run) -> None:
    """Loses the interrupt that comes in each of its cases."""
    _Interrupted()
