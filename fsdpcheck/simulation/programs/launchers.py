"""Processes by which a program starts its ranks itself: on rank r of W, the r-th of them is run as this rank.

``torch.multiprocessing.spawn(f, nprocs=W)``, ``start_processes``, and W times
``Process(target=f, args=(r, W, ...)).start()``: a process that is given its number and the number of ranks. It runs
where it is started, in the rank's own thread; the others are the other ranks, and to start them does nothing. Any other
process is a child, as ever, and no rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process
from typing import Any, Final

import torch.multiprocessing as multiprocessing

from fsdpcheck.compat import frames_private, groups_private
from fsdpcheck.compat.torch_private import replaced
from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.simulation import globals as of_processes
from fsdpcheck.simulation.current_rank import current_rank

_SHARED: Final = ("multiprocessing.", "torch.multiprocessing.")
"""Modules of what processes share: queues, pipes, locks, values."""


class Launched:
    """The ranks of a program on ``world_size`` simulated ones that the program starts itself."""

    def __init__(self, world_size: int) -> None:
        self._size = world_size
        self._started = Counter[int]()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, a rank that starts all of them goes on as the one of its number."""
        spawn = self._spawn
        with (
            replaced(multiprocessing, spawn=spawn("spawn"), start_processes=spawn("start_processes")),
            replaced(process.BaseProcess, start=self._start(process.BaseProcess.start)),
        ):
            yield

    def _spawn(self, name: str) -> Callable[..., Any]:
        real = getattr(multiprocessing, name)

        def ours(
            fn: Callable[..., Any],
            args: Any = (),
            nprocs: int = 1,
            join: bool = True,
            daemon: bool = False,
            start_method: str = "spawn",
            **ways: Any,
        ) -> Any:
            rank = current_rank()
            if rank is None:
                return real(fn, args, nprocs, join, daemon, start_method, **ways)
            if nprocs != self._size:
                raise NotSupported(
                    explain(
                        "a program that spawns its ranks runs on as many simulated ranks as it spawns",
                        got=f"torch.multiprocessing.{name}(..., nprocs={nprocs}) on {self._size} simulated ranks",
                        wanted=f"nprocs={self._size}",
                        then=f"simulate it on {nprocs} ranks",
                    )
                )
            _as_child(rank, start_method, lambda: fn(rank, *args))
            return None if join else _Spawned()

        return ours

    def _start(self, real: Callable[[Any], None]) -> Callable[[Any], None]:
        def ours(child: Any) -> None:
            rank = current_rank()
            if rank is None or not frames_private.is_a_program(sys._getframe(1).f_code.co_filename):
                return real(child)
            given = [*child._args, *child._kwargs.values()]
            number = self._started[rank]
            if not {number, self._size} <= {each for each in given if type(each) is int}:
                return real(child)
            self._started[rank] += 1
            _require_nothing_shared(given)
            child._popen = _Ended()
            if number == rank:
                _as_child(rank, child._start_method or multiprocessing.get_start_method(), lambda: _run(child))
            return None

        return ours


class _Ended:
    """What a process knows of its child, which has ended well: those that do not are failures of their rank."""

    pid = returncode = 0

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None: ...

    kill = close = terminate


class _Spawned:
    """What a program that does not join at once gets; all are over by then."""

    processes: tuple[()] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Whether all have ended."""
        return True

    def pids(self) -> list[int]:
        """There are no processes."""
        return []


def _as_child(rank: int, method: str, work: Callable[[], object]) -> None:
    """Do the work as a process would that this rank had started; its process groups end with it."""
    (of_processes.inherit_generators if method == "fork" else of_processes.begin_generators)(rank)
    groups = groups_private.groups_of_this_thread()
    work()
    groups_private.forget_groups_but(groups)


def _run(child: Any) -> None:
    try:
        child.run()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _require_nothing_shared(given: list[Any]) -> None:
    for each in given:
        if type(each).__module__.startswith(_SHARED):
            raise NotSupported(
                explain(
                    "simulated ranks do not share what a program makes before it starts them",
                    got=f"a process that is given its rank and a {type(each).__qualname__} of multiprocessing",
                    wanted="ranks that exchange what they have by torch.distributed alone",
                    then="simulate the function that each rank runs: fsdpcheck.simulate(function, world_size)",
                )
            )
