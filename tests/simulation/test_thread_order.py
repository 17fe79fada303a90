"""Threads of one rank: which of two calls first is searched where the program allows both, and only there."""

from __future__ import annotations

import ctypes
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import Search, search, simulate
from fsdpcheck.simulation import waits
from fsdpcheck.simulation.decisions import LATE, decoded, encoded
from fsdpcheck.simulation.turn import SIDE_BY_SIDE

Program = Callable[[int, int], object]
VOID = "a thread that a rank started called a collective"


def joined(program: Program) -> Callable[[], object]:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(dist.get_rank(), dist.get_world_size())

    return whole


def tried(program: Program, world_size: int = 2) -> Search:
    return search(joined(program), world_size)


def started(*targets: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def reduced(*shape: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    value = torch.ones(shape)
    dist.all_reduce(value, group=group)
    return value


def two_on_one_group(rank: int, size: int) -> None:
    (thread,) = started(lambda: reduced(3))
    reduced(2)
    thread.join()


def two_of_which_one_computes_first(rank: int, size: int) -> None:
    """It is waited for: it could be first as well."""
    (thread,) = started(lambda: sum(range(1_000_000)) and reduced(3))
    reduced(2)
    thread.join()


def two_receive_from_one(rank: int, size: int) -> object:
    got = torch.empty(2)
    if rank == 0:
        for value in range(2):
            dist.send(torch.full((1,), float(value)), 1)
        return None
    for thread in started(lambda: dist.recv(got[:1], 0), lambda: dist.recv(got[1:], 0)):
        thread.join()
    return got.tolist()


def two_tasks_of_one_executor(rank: int, size: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(reduced, 2), pool.submit(reduced, 3)]:
            future.result()


def two_make_a_group(rank: int, size: int) -> None:
    for thread in started(*(lambda shape=shape: reduced(shape, group=dist.new_group([0, 1])) for shape in (2, 3))):
        thread.join()


def two_take_one_lock(rank: int, size: int) -> None:
    lock = threading.Lock()

    def hold(*shape: int) -> None:
        with lock:
            reduced(*shape)

    (thread,) = started(lambda: hold(3))
    hold(2)
    thread.join()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (two_take_one_lock, "mismatch"),
        (two_make_a_group, "mismatch"),
        (two_on_one_group, "mismatch"),
        (two_of_which_one_computes_first, "mismatch"),
        (two_receive_from_one, "order"),
        (two_tasks_of_one_executor, "mismatch"),
    ],
)
def test_two_threads_whose_calls_share_an_order_are_found_with_the_threads_and_lines(
    program: Program, kind: str
) -> None:
    found = tried(program)
    assert found.simulation.failure is not None
    assert found.simulation.failure.kind == kind
    (decision,) = found.order
    assert "first of its threads at" in decision
    text = found.simulation.failure.text
    assert f"decided  {decision}, at {__file__}:" in text
    assert text.count(f", at {__file__}:") >= 2
    assert tried(program).order == found.order, "it is found by the same name again"


def two_on_a_group_each(rank: int, size: int) -> object:
    own = dist.new_group([0, 1])
    (thread,) = started(lambda: reduced(3, group=own))
    reduced(2)
    thread.join()
    return None


def held_back_by_a_join(rank: int, size: int) -> object:
    (thread,) = started(lambda: reduced(3))
    thread.join()
    return reduced(2).tolist()


def held_back_by_a_lock(rank: int, size: int) -> object:
    lock, found = threading.Lock(), []
    lock.acquire()

    def after() -> None:
        with lock:
            found.append(reduced(3).tolist())

    (thread,) = started(after)
    found.append(reduced(2).tolist())
    lock.release()
    thread.join()
    return found


def held_back_by_a_queue(rank: int, size: int) -> object:
    asked: queue.Queue[int] = queue.Queue()
    found: list[object] = []

    def serve() -> None:
        found.append(reduced(asked.get()).tolist())

    (thread,) = started(serve)
    found.append(reduced(2).tolist())
    asked.put(3)
    thread.join()
    return found


def groups_made_by_one_thread_after_another(rank: int, size: int) -> object:
    groups: list[dist.ProcessGroup] = []
    (thread,) = started(lambda: groups.append(dist.new_group([0, 1])))
    thread.join()
    groups.append(dist.new_group([0, 1]))
    return [reduced(2, group=group).tolist() for group in groups]


def received_by_tag(rank: int, size: int) -> object:
    """The second waits first; the sender comes to it last."""
    got = torch.empty(2)
    if rank == 0:
        for tag in range(2):
            dist.send(torch.full((1,), float(tag)), 1, tag=tag)
        return None
    for thread in started(lambda: dist.recv(got[1:], 0, tag=1), lambda: dist.recv(got[:1], 0, tag=0)):
        thread.join()
    return got.tolist()


def hands_over_its_buffer(rank: int, size: int, keeps: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if rank == 0:
        for step in range(3):
            dist.send(torch.full((1,), float(step)), 1)
        return None
    received: queue.Queue[torch.Tensor] = queue.Queue()

    def receive() -> None:
        buffer = torch.empty(1)
        for _ in range(3):
            dist.recv(buffer, 0)
            received.put(keeps(buffer))

    (thread,) = started(receive)
    seen = [received.get().item() for _ in range(3)]
    thread.join()
    return seen


def hands_over_a_copy(rank: int, size: int) -> object:
    return hands_over_its_buffer(rank, size, torch.clone)


def hands_over_and_waits(rank: int, size: int) -> object:
    """The buffer itself, which the thread fills again when it was told that it has been read."""
    buffer, filled, read = torch.empty(1), threading.Semaphore(0), threading.Semaphore(0)
    if rank == 0:
        for step in range(3):
            dist.send(torch.full((1,), float(step)), 1)
        return None

    def receive() -> None:
        for _ in range(3):
            dist.recv(buffer, 0)
            filled.release()
            read.acquire()

    (thread,) = started(receive)
    seen = []
    for _ in range(3):
        filled.acquire()
        seen.append(buffer.item())
        read.release()
    thread.join()
    return seen


def test_a_buffer_that_a_thread_hands_over_and_fills_again_is_found_where_the_other_is_slow() -> None:
    found = tried(lambda rank, size: hands_over_its_buffer(rank, size, lambda buffer: buffer))
    failure = found.simulation.failure
    assert failure is not None
    assert failure.kind == "order"
    assert "first order    [0.0, 1.0, 2.0]\n" in failure.text, "woken, its own thread goes on at once"
    assert f"decided  rank 1: thread receive #0 calls first, at {__file__}:" in failure.text
    assert f"not      rank 1: its own thread, which was woken, goes on, at {__file__}:" in failure.text
    assert {state.rank for state in failure.ranks} == {1}
    assert found.order == (LATE,)
    assert decoded(encoded(found.order)) == found.order


@pytest.mark.parametrize("program", [hands_over_a_copy, hands_over_and_waits])
def test_what_a_thread_hands_over_and_leaves_alone_is_no_finding(program: Program) -> None:
    found = tried(program)
    assert found.simulation.failure is None, found.simulation.failure.text
    assert found.simulation.returned[1] == [0.0, 1.0, 2.0]
    assert found.complete
    assert found.schedules == (2 if program is hands_over_a_copy else 1), "it has an order more where they differ"


@pytest.mark.parametrize(
    "program",
    [
        two_on_a_group_each,
        held_back_by_a_join,
        held_back_by_a_lock,
        held_back_by_a_queue,
        groups_made_by_one_thread_after_another,
        received_by_tag,
    ],
)
def test_threads_that_share_no_order_or_hold_each_other_back_are_no_finding(program: Program) -> None:
    found = tried(program)
    assert found.simulation.failure is None, found.simulation.failure.text
    assert (found.schedules, found.complete, found.proved) == (1, True, False)
    assert VOID in found.voids
    assert set(found.voids) <= {VOID, SIDE_BY_SIDE, "calls on several groups were under way together"}


def joins_on_one_rank_before_and_on_the_other_after(rank: int, size: int) -> object:
    own = dist.new_group([0, 1])
    (thread,) = started(lambda: reduced(3, group=own))
    if rank:
        thread.join()
    value = reduced(2).tolist()
    thread.join()
    return value


def waits_for_a_key_that_the_other_thread_sets(rank: int, size: int) -> object:
    store = dist.distributed_c10d._get_default_store()
    (thread,) = started(lambda: store.get(f"ready {rank}"))
    value = reduced(2).tolist()
    store.set(f"ready {rank}", "yes")
    thread.join()
    return value


def waits_for_a_lock_that_is_held_across_a_call(rank: int, size: int) -> object:
    own, lock, taken = dist.new_group([0, 1]), threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            reduced(3, group=own)

    (thread,) = started(hold)
    taken.wait()
    with lock:
        value = reduced(2).tolist()
    thread.join()
    return value


@pytest.mark.parametrize(
    "program",
    [
        joins_on_one_rank_before_and_on_the_other_after,
        waits_for_a_key_that_the_other_thread_sets,
        waits_for_a_lock_that_is_held_across_a_call,
    ],
)
@pytest.mark.parametrize("schedule", ["forward", "reversed"])
def test_a_rank_that_is_blocked_in_one_thread_goes_on_in_another(program: Program, schedule: str) -> None:
    done = simulate(joined(program), 2, show=False, schedule=schedule)  # type: ignore[arg-type]
    assert done.failure is None, done.failure.text
    assert done.returned == ([2.0, 2.0],) * 2
    assert tried(program).simulation.failure is None


def test_all_threads_of_a_rank_blocked_is_a_deadlock() -> None:
    def program(rank: int, size: int) -> None:
        own = dist.new_group([0, 1])
        threads = started(lambda: dist.barrier(group=own)) if rank == 0 else []
        if rank == 0:
            dist.barrier()
        for thread in threads:
            thread.join()

    done = simulate(joined(program), 2, show=False)
    assert done.failure is not None
    assert done.failure.kind == "deadlock"
    assert "rank 0: in barrier() #" in done.failure.text


def threads_that_append(rank: int, size: int) -> object:
    found: list[int] = []
    for thread in started(*(lambda number=number: found.append(number) for number in range(2))):
        thread.join()
    return sorted(found)


def tasks_that_append(rank: int, size: int) -> object:
    found: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(2):
            pool.submit(found.append, number)
    return sorted(found)


def one_after_another(rank: int, size: int) -> object:
    found: list[int] = []
    for number in range(2):
        started(lambda number=number: found.append(number))[0].join()
    with ThreadPoolExecutor(1) as pool:
        for number in range(2):
            pool.submit(found.append, number)
    return found


@pytest.mark.parametrize(
    ("program", "proved"), [(threads_that_append, False), (tasks_that_append, False), (one_after_another, True)]
)
def test_threads_of_a_rank_that_run_at_once_are_no_proof_even_if_they_call_nothing(
    program: Program, proved: bool
) -> None:
    found = tried(program)
    assert found.proved is proved
    assert found.voids == (() if proved else (SIDE_BY_SIDE,))


def test_locks_that_a_program_makes_do_what_those_of_python_do() -> None:
    def program(rank: int, size: int) -> object:
        once, again = threading.Lock(), threading.RLock()
        changed, values = threading.Condition(again), [0]

        def change() -> None:
            with changed:
                values[0] = rank
                changed.notify()

        with once, again, again:
            told = [once.acquire(False), once.acquire(timeout=0), once.locked(), repr(once).startswith("<locked ")]
        with changed:
            (thread,) = started(change)
            told += [changed.wait_for(lambda: values[0] == rank)]
        thread.join()
        with pytest.raises(RuntimeError, match="release unlocked lock"):
            once.release()
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(once)
        return told

    for done in (simulate(joined(program), 2, show=False), tried(program).simulation):
        assert done.failure is None, done.failure.text
        assert done.returned == ([False, False, True, True, True],) * 2
    assert type(threading.Lock()) is type(queue.Queue().mutex), "outside of ranks they are Python's own"


def test_a_thread_that_hands_over_the_lock_of_the_interpreter_does_not_stand_still(tmp_path: Path) -> None:
    here = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    lock = ctypes.create_string_buffer(4)
    (tmp_path / "status").write_text("voluntary_ctxt_switches:\t2\nnonvoluntary_ctxt_switches:\t1\n")
    for address, stands in ((here + 0x210, False), (ctypes.addressof(lock), True)):
        (tmp_path / "syscall").write_text(f"{waits._FUTEX} {address:#x} 0x80 0x2 0x0 0x0 0x0 0x7f 0x7f\n")
        assert waits.stands(tmp_path)[0] is stands
