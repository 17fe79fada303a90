"""Simulated runs come to an end whatever a rank does: swallow what unwinds it, leave, compute or wait for ever."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdpcheck.errors import NotSupported
from fsdpcheck.execution import RankResult
from fsdpcheck.judging.run import _raise_what_is_no_finding
from fsdpcheck.processes import limit as _spent
from fsdpcheck.processes.limit import Limit, Spent
from fsdpcheck.simulation import shared_locks
from fsdpcheck.simulation.current_rank import set_current_rank
from fsdpcheck.simulation.scheduler import Baton
from fsdpcheck.simulation.shared_locks import LockApart
from tests.simulation.simulator import Simulator, failure_of


@pytest.fixture
def other_than_first(simulate: Simulator) -> Iterator[Callable[[Callable[[], object]], str]]:
    """Runs ranks of which all but rank 0, which reduces, do something else; tells the kind and the text of the failure.

    The engine serves another run afterwards.
    """

    def run(action: Callable[[], object]) -> str:
        def body(rank: int, size: int, result: RankResult) -> None:
            if rank == 0:
                dist.all_reduce(torch.ones(3))
            else:
                action()

        failure = simulate(body).failure
        assert failure is not None
        assert simulate(lambda rank, size, result: dist.barrier()).failure is None
        return f"{failure.kind}: {failure.text}"

    return run


def test_a_rank_that_swallows_everything_takes_nothing_from_the_first_failure(
    other_than_first: Callable[[Callable[[], object]], str],
) -> None:
    def swallows() -> None:
        while True:
            try:
                dist.all_reduce(torch.ones(2))
            except BaseException:
                continue

    assert other_than_first(swallows).startswith("mismatch: mismatch: call #0")


def test_a_failure_that_came_first_stands_when_a_rank_computes_for_ever(
    simulate: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate.engine, "_limit", Limit(0.01))
    over = threading.Event()

    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            raise ValueError("a bad shard")
        while not over.is_set():
            pass

    text = failure_of(simulate(body), "raised")
    over.set()
    assert "ValueError: a bad shard" in text
    assert "rank 1: running, at " in text


class _LeavesInPassing:
    """Python swallows what is raised in __del__."""

    def __del__(self) -> None:
        os._exit(7)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exit_that_python_swallows_is_an_exit(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            _LeavesInPassing()
        if size == 3:
            dist.barrier()

    for size in (2, 3):
        assert failure_of(simulate(body, size), "exited").startswith("rank 1 left with exit code 7")


def test_a_forked_child_that_leaves_is_the_child_alone(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if (child := os.fork()) == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        dist.barrier()

    assert simulate(body).failure is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_that_share_a_lock_are_told_so(simulate: Simulator) -> None:
    """Not a deadlock: on real ranks there would be none. Who holds it is known of either kind of lock.

    A store that is served in this process, as that of real ranks is, keeps nobody from knowing it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for shared in (threading.Lock(), threading.RLock()):
        held = SimpleNamespace(lock=shared)

        def body(rank: int, size: int, result: RankResult, held: SimpleNamespace = held) -> None:
            with held.lock:
                dist.barrier()

        execution = simulate(body, 3)
        text = failure_of(execution, "shared lock")
        assert "rank 1 waits for one that rank 0 holds" in text
        assert text.count(f"{__file__}:") == 2
        assert "--engine processes" in text
        with pytest.raises(NotSupported):
            _raise_what_is_no_finding(execution.failure)
        assert simulate(lambda rank, size, result: dist.barrier(), 3).failure is None
    assert store.port


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_wait_that_nobody_can_end_is_known_without_a_clock(
    other_than_first: Callable[[Callable[[], object]], str],
) -> None:
    said = other_than_first(threading.Event().wait)
    assert said.startswith("no progress: no progress: rank 1 waits for another thread at ")
    assert "no thread is left that can move" in said
    assert "rank 0: blocked" in said


def test_a_wait_that_ends_by_itself_is_no_failure(simulate: Simulator) -> None:
    """A thread that will wake the rank is asleep with a time-out; then all threads but one are in endless waits."""
    looked = threading.Event()
    nobody_moves = shared_locks.nobody_moves

    def look() -> bool:
        found = nobody_moves()
        looked.set()
        return found

    def body(rank: int, size: int, result: RankResult) -> None:
        woken = threading.Event()
        thread = threading.Thread(target=lambda: (looked.wait(60), woken.set()))
        thread.start()
        woken.wait()
        thread.join()
        dist.barrier()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_locks, "nobody_moves", look)
        assert simulate(body).failure is None
    assert looked.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_ends_while_it_is_looked_at_is_no_failure(
    simulate: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of ranks that have all ended are in endless waits, for the next run."""
    nobody_moves, end = shared_locks.nobody_moves, Baton.end
    looking, ended, found = threading.Event(), threading.Event(), []

    def look() -> bool:
        looking.set()
        ended.wait()
        while not nobody_moves():  # until the last rank's thread has come to rest
            pass
        found.append(True)
        return True

    def tell(baton: Baton, rank: int) -> None:
        end(baton, rank)
        if baton.all_ended:
            ended.set()

    def body(rank: int, size: int, result: RankResult) -> None:
        looking.wait()
        dist.barrier()

    monkeypatch.setattr(shared_locks, "nobody_moves", look)
    monkeypatch.setattr(Baton, "end", tell)
    monkeypatch.setattr(Spent, "look", lambda spent: True)
    assert simulate(body).failure is None
    assert found == [True]


def test_what_a_run_uses_up_is_processor_time_and_sleep_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(clock=0.0, processor=5.0, ranks="a")
    monkeypatch.setattr(_spent, "time", SimpleNamespace(monotonic=lambda: now.clock))
    spent = Spent(limit := Limit(10.0), lambda: now.processor, lambda: now.ranks)
    for ranks in "abcdefgh":  # each moves, or is kept from its processor by others
        now.clock, now.ranks = now.clock + 1000, ranks
        assert not spent.look()
    assert (spent.seconds, spent.exceeded) == (0.0, "")
    for _ in range(10):  # asleep; a process that was stopped for 1000 s has slept no longer than for a look
        now.clock += 1000
        assert spent.look()
    assert spent.seconds == pytest.approx(10 * 2 * _spent.LOOK_SECONDS)
    now.processor += 9
    assert spent.exceeded.startswith("9 s of processor time and 2 s in which no rank used any are more than the 10 s")
    limit.learn(2.0)
    assert (limit.seconds, spent.exceeded) == (40.0, "")


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    set_current_rank(rank)
    try:
        yield
    finally:
        set_current_rank(None)  # type: ignore[arg-type]


def _can_take(lock: LockApart, rank: int | None) -> bool:
    """Whether another thread, which is this rank or none, can take the lock; it gives it back."""
    found: list[bool] = []

    def take() -> None:
        with _as_rank(rank) if rank is not None else nullcontext():
            found.append(lock.acquire(blocking=False))
            if found[0]:
                lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_a_lock_apart_excludes_threads_of_one_rank_and_those_of_none() -> None:
    for kind in (threading.Lock, threading.RLock):
        lock = LockApart(type(kind()))
        lock.widen(3)
        with _as_rank(0), lock:
            assert [_can_take(lock, rank) for rank in (0, 1, 2, None)] == [False, True, True, False]
        with lock:
            assert [_can_take(lock, rank) for rank in (0, 1, 2, None)] == [False] * 4
        assert all(_can_take(lock, rank) for rank in (0, 1, 2, None))


def test_only_locks_that_names_alone_hold_are_put_apart() -> None:
    module = ModuleType("module_with_locks")
    held, taken = threading.Lock(), threading.Lock()
    taken.acquire()
    module.free, module.also = threading.Lock(), threading.RLock()  # type: ignore[attr-defined]
    module.held, module.condition = held, threading.Condition(held)  # type: ignore[attr-defined]
    module.taken = taken  # type: ignore[attr-defined]
    del held, taken
    shared_locks._replace([module])
    apart = {name for name, value in vars(module).items() if isinstance(value, LockApart)}
    assert apart == {"free", "also"}
