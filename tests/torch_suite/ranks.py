"""One test on simulated ranks, on processes with gloo, or on threads with the process group of PyTorch's own tests.

A rank runs ``_run``, which is PyTorch's, as its process does there; what differs is how a rank comes to be, and how
ranks of one process meet outside of what they test.
"""

from __future__ import annotations

import os
import re
import threading
import time
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase, MultiThreadedTestCase
from torch.testing._internal.distributed import multi_threaded_pg

from fsdpcheck import simulate
from tests.torch_suite.results import Outcome

_FAILED = MultiProcessTestCase.TEST_ERROR_EXIT_CODE
_LOOK_SECONDS = 0.02
_SKIPPED = "skipped: "


class Case:
    """A test as the main process of PyTorch has it, which starts ranks: its folders are there."""

    def __init__(self, kind: type[Any], name: str, meet: Callable[[Any], object] | None = None) -> None:
        """``meet``: how ranks of one process wait for one another; processes do it by their numbers."""
        own: dict[str, Any] = {"_spawn_processes": lambda self: None, "run_test": _telling(kind)}
        if meet is not None and hasattr(kind, "_barrier"):
            own["_barrier"] = lambda self, *args, **options: meet(self.rank)
        self.kind, self.name = type(kind.__name__, (kind,), own), name
        self.kind.setUpClass()
        self.main = self.kind(name)
        self.main.setUp()
        self.size = int(self.main.world_size)

    def run(self, rank: int, pipe: Any) -> None:
        self.kind._run(rank, self.name, self.main.file_name, pipe)

    def judged(self, codes: list[Any], told: list[str]) -> Outcome:
        """As ``MultiProcessTestCase._check_return_codes`` judges exit codes, by rank."""
        for skip in TEST_SKIPS.values():
            if codes[0] == skip.exit_code:
                why = (text.removeprefix(_SKIPPED) for text in told if text.startswith(_SKIPPED))
                return Outcome("skipped", next(why, skip.message))
        checked = getattr(getattr(self.kind, self.name), "__wrapped__", None)
        wanted = self.main.special_return_code_checks.get(checked, 0)
        if told or None in codes or (codes[0] != wanted and checked not in self.main.skip_return_code_checks):
            return Outcome("failed", first_line(told[0]) if told else f"exit codes {codes}")
        return Outcome("passed")


def _telling(kind: type[Any]) -> Callable[[Any, str, Any], None]:
    """``run_test`` of a class, in which a rank that skips a test tells why."""

    def run_test(self: Any, name: str, pipe: Any) -> None:
        body = getattr(self, name)

        def telling() -> None:
            try:
                body()
            except unittest.SkipTest as skip:
                pipe.send(f"{_SKIPPED}{skip}")
                raise

        setattr(self, name, telling)
        kind.run_test(self, name, pipe)

    return run_test


class _Pipe:
    """What a rank of this process tells its failure by."""

    closed = False

    def __init__(self) -> None:
        self._other, self._own = multiprocessing.Pipe()
        self.told: list[str] = []

    def fileno(self) -> int:
        return self._own.fileno()

    def send(self, text: str) -> None:
        self.told.append(text)

    def close(self) -> None:
        """It is closed when nobody holds it."""


def on_simulated(kind: type[Any], name: str) -> Outcome:
    if issubclass(kind, MultiThreadedTestCase):
        return _threads_on_simulated(kind, name)
    meetings: dict[int, int] = {}

    def meet(rank: int) -> None:
        """By keys of a store, which is no collective and stays when groups are destroyed."""
        store, _, _ = next(dist.distributed_c10d.rendezvous("meeting://", rank, case.size))
        meetings[rank] = number = meetings.get(rank, 0) + 1
        if store.add(f"come {number}", 1) == case.size:
            store.set(f"all {number}", "")
        store.wait([f"all {number}"])

    case = Case(kind, name, meet)
    pipes = [_Pipe() for _ in range(case.size)]

    def as_rank() -> Any:
        rank = _alone()
        try:
            return case.run(rank, pipes[rank]) or 0
        except SystemExit as error:
            return error.code

    done = simulate(as_rank, case.size, show=False)
    told = [text for pipe in pipes for text in pipe.told]
    if done.failure is not None:
        told.append(f"{done.failure.kind}: {done.failure.text}")
    return case.judged(list(done.returned), told)


def on_gloo(kind: type[Any], name: str) -> Outcome:
    """If one rank fails, the others are ended, as in PyTorch's own runs."""
    if issubclass(kind, MultiThreadedTestCase):
        return Outcome("skipped", "a test of threads")
    case = Case(kind, name)
    codes: list[int | None] = [None] * case.size
    ends, children, told = list[Connection](), dict[int, int](), list[str]()
    for rank in range(case.size):
        end, other = multiprocessing.Pipe()
        child = os.fork()
        if child == 0:
            _end_as(lambda rank=rank, other=other: case.run(rank, other))
        ends.append(end)
        children[child] = rank
    while children and _FAILED not in codes:
        for child, rank in list(children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del children[child]
        told += [text for end in ends for text in _received(end)]
        time.sleep(_LOOK_SECONDS)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return case.judged(codes, told)


def on_threaded(kind: type[Any], name: str) -> Outcome:
    if issubclass(kind, MultiThreadedTestCase):
        return _threads_as_they_are(kind, name)
    size = int(os.environ["WORLD_SIZE"])
    together = threading.Barrier(size)
    case = Case(kind, name, lambda rank: together.wait())
    pipes, codes = [_Pipe() for _ in range(size)], list[Any]([None] * size)
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def as_rank(rank: int) -> None:
        try:
            own = case.kind(name)
            own.rank, own.file_name = rank, case.main.file_name
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            own.run_test(name, pipes[rank])
            codes[rank] = 0
        except SystemExit as error:
            codes[rank] = error.code
        except BaseException as error:
            pipes[rank].send(f"{type(error).__name__}: {error}")
            codes[rank] = _FAILED
        if codes[rank] == _FAILED:
            multi_threaded_pg.ProcessLocalGroup.exception_handle(RuntimeError(f"rank {rank} has failed"))

    threads = [threading.Thread(target=as_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and _FAILED not in codes:
        time.sleep(_LOOK_SECONDS)
    return case.judged(codes, [text for pipe in pipes for text in pipe.told])


RUNS: dict[str, Callable[[type[Any], str], Outcome]] = {
    "simulated": on_simulated,
    "gloo": on_gloo,
    "threaded": on_threaded,
}


def _threads_as_they_are(kind: type[Any], name: str) -> Outcome:
    result = unittest.TestResult()
    kind(name).run(result)
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1])
    wrong = result.errors + result.failures
    return Outcome("failed", first_line(wrong[0][1])) if wrong else Outcome("passed")


def _threads_on_simulated(kind: type[Any], name: str) -> Outcome:
    """Ranks of a test of threads, which has no exit codes: a store of theirs, and what each raises."""
    own = type(kind.__name__, (kind,), {"_spawn_threads": lambda self: None})
    main = own(name)
    main.setUp()

    def as_rank() -> None:
        rank = _alone()
        own.global_store, _, _ = next(dist.distributed_c10d.rendezvous("threads://", rank, main.world_size))
        own._run(name, rank, main.world_size)

    done = simulate(as_rank, main.world_size, show=False)
    raised = list(own.exception_queue.queue)
    for _, (_, error, _) in raised:
        if isinstance(error, unittest.SkipTest):
            return Outcome("skipped", str(error))
    if raised:
        return Outcome("failed", f"{type(raised[0][1][1]).__name__}: {raised[0][1][1]}"[:300])
    return Outcome("failed", f"{done.failure.kind}: {done.failure.text}"[:300]) if done.failure else Outcome("passed")


def _alone() -> int:
    """The number of a simulated rank, whose environment becomes that of a process which torchrun has not started."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    return rank


def _end_as(rank: Callable[[], object]) -> None:
    code = 1
    try:
        rank()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        os._exit(code)


def _received(end: Connection) -> list[str]:
    """What has come by now."""
    try:
        return [end.recv()] if end.poll() else []
    except (EOFError, OSError):  # its rank has ended
        return []


def first_line(text: str) -> str:
    """The first line of an exception, of its traceback's text."""
    last = re.split(r"^Traceback \(most recent call last\):$", text, flags=re.MULTILINE)[-1]
    return next((line for line in last.splitlines() if line and not line[0].isspace()), text)[:300]
