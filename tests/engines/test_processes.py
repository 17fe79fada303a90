"""Real processes: what only they can suffer, and that none is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._real import monitor
from fsdpcheck.engines._real import pool as _pool
from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.transport import LocalLink
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution import Execution, Failure, RunRequest
from fsdpcheck.processes import leftovers, zygote
from fsdpcheck.processes.limit import Limit

ADAPTERS = Path(__file__).with_name("adapters_for_tests.py")


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessesEngine]:
    opened = ProcessesEngine(budget_seconds=100)
    yield opened
    opened.close()


def request_for(attribute: str, world_size: int = 2) -> RunRequest:
    case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(world_size), BatchLayout("contiguous", world_size))
    return RunRequest(case, f"{ADAPTERS}:{attribute}")


def failed(execution: Execution) -> Failure:
    assert execution.failure is not None, "the run completed"
    return execution.failure


def pids(engine: ProcessesEngine) -> list[int]:
    return [link.pid for pool in engine._pools.values() for link in pool.links]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_rank_leaves_changed_of_its_process_is_named_and_put_back(engine: ProcessesEngine) -> None:
    """Handlers of signals too, which only the thread may set that is a real rank's."""
    execution = engine.run(request_for("handles_a_signal"))
    assert execution.failure is None
    workers = pids(engine)
    assert "rank 1 left torch.is_anomaly_enabled() on" in execution.left
    assert any(told.startswith("rank 1 left signal handlers changed (") for told in execution.left), execution.left
    execution = engine.run(request_for("needs_no_handler"))
    assert (execution.failure, execution.left, pids(engine)) == (None, (), workers)


def test_what_runs_leave_and_do_not_compare_is_told_between_them_and_put_back(engine: ProcessesEngine) -> None:
    """Names that no judge computes with: comparing them had been half of what a small run costs."""
    assert engine.run(request_for("replaces_a_name")).left == ()
    assert engine.settle() == ("rank 1 left torch.utils.checkpoint.checkpoint replaced by builtins.print",)
    assert engine.settle() == ()
    os.kill(pids(engine)[0], 9)
    (told,) = engine.settle()
    assert told.startswith("rank 0 left a process that ended between two runs")
    assert engine.settle() == ()
    assert engine.run(request_for("honest")).failure is None


@pytest.mark.parametrize(
    ("attribute", "kind", "words"),
    [
        ("killed", "lost", "rank 1 was lost: killed by SIGKILL"),
        ("killed_without_a_name", "lost", f"rank 1 was lost: killed by signal {signal.SIGRTMIN + 1}"),
        ("segfaults", "lost", "rank 1 was lost: killed by SIGSEGV"),
        ("leaves_at_once", "exited", "rank 1 left with exit code 7"),
    ],
)
def test_a_worker_that_dies_is_a_failure_and_the_next_run_has_new_ones(
    engine: ProcessesEngine, attribute: str, kind: str, words: str
) -> None:
    assert engine.run(request_for("honest")).failure is None
    before = pids(engine)
    failure = failed(engine.run(request_for(attribute)))
    assert (failure.kind, failure.text.splitlines()[0].startswith(words)) == (kind, True), failure.text
    assert not any(map(is_alive, before)), "every worker of a failed pool is reaped"
    assert engine.run(request_for("honest")).failure is None
    assert set(before).isdisjoint(pids(engine))


def test_a_worker_killed_between_two_runs_is_a_failure_of_the_next(engine: ProcessesEngine) -> None:
    engine.run(request_for("honest"))
    os.kill(pids(engine)[0], 9)
    assert failed(engine.run(request_for("honest"))).kind == "lost"
    assert engine.run(request_for("honest")).failure is None


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_deadlock_is_proved_in_under_a_second(engine: ProcessesEngine, world_size: int) -> None:
    failure = failed(engine.run(request_for("late_alone", world_size)))
    assert failure.kind == "deadlock"
    assert failure.seconds is not None
    assert failure.seconds < 1


def test_a_deadlock_is_proved_from_the_table_and_by_no_clock(
    engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the clock standing still there is no time that could run out, not even a budget's."""
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert failed(engine.run(request_for("late_alone"))).kind == "deadlock"


def test_a_group_that_a_member_does_not_make_is_a_proved_hang(engine: ProcessesEngine) -> None:
    failure = failed(engine.run(request_for("makes_a_group_alone")))
    assert failure.kind == "deadlock"
    assert "rank 0: in new_group() #0 on ranks [0, 1]" in failure.text
    assert "was never called by rank 1 (0 calls on this group)" in failure.text


def test_groups_of_one_name_and_other_members_are_a_mismatch(engine: ProcessesEngine) -> None:
    failure = failed(engine.run(request_for("makes_other_groups", 3)))
    assert failure.kind == "mismatch"
    assert "ranks disagree about group '1'" in failure.text
    assert "  rank 0: new_group([0, 1]), at " in failure.text
    assert "  rank 1: new_group([0, 1, 2]), at " in failure.text


def test_groups_that_not_all_ranks_make_hold_their_members_alone() -> None:
    engine = ProcessesEngine(budget_seconds=100)
    assert engine.run(request_for("makes_groups_of_some", 3)).failure is None
    engine.close()


def test_a_group_that_is_refused_is_no_wait(engine: ProcessesEngine) -> None:
    """A rank is waited for in a new group from when it waits itself, so what it raises before is told as raised."""
    assert failed(engine.run(request_for("refused_a_group"))).kind == "raised"


def test_a_call_that_gloo_refuses_is_none_that_others_met(engine: ProcessesEngine) -> None:
    failure = failed(engine.run(request_for("refused_by_gloo")))
    assert failure.kind == "raised", failure.text
    assert "rank 0: in all_reduce(float64[4]) sum #0 on ranks [0, 1], waiting for rank 1" in failure.text


def test_a_rank_whose_thread_computes_is_not_stuck(engine: ProcessesEngine) -> None:
    """Its program and the other rank wait for each other; the thread comes to what frees both. No order is broken."""
    execution = engine.run(request_for("helped_by_a_thread"))
    assert execution.failure is None, execution.failure


def test_gloos_own_words_are_kept(engine: ProcessesEngine) -> None:
    """gloo aborts a process that gets more bytes than it expects; whichever comes first, it is a mismatch."""
    failure = failed(engine.run(request_for("other_dtype")))
    assert failure.kind == "mismatch"
    assert "differs between its members in input dtype, output dtype" in failure.text


@pytest.mark.nightly
def test_a_budget_that_runs_out_is_no_progress_and_shows_all_stacks() -> None:
    attributes = ("spins", "keeps_the_machine")
    engines = [
        ProcessesEngine(budget_seconds=20) for _ in attributes
    ]  # by the clock: ranks of a busy machine get there
    for engine in engines:
        engine.run(request_for("honest"))  # workers are there, so that the budget is for the ranks' own calls
    with ThreadPoolExecutor(len(engines)) as both:
        executions = [*both.map(lambda engine, name: engine.run(request_for(name)), engines, attributes)]
    for engine, attribute, execution in zip(engines, attributes, executions, strict=True):
        failure = failed(execution)
        assert failure.kind == "no progress", attribute
        assert failure.seconds is None
        waiting, running = failure.ranks
        assert (waiting.state, running.state) == ("blocked", "running")
        assert any(f"in {attribute}" in line for line in running.stack)
        assert any("in step" in line for line in waiting.stack)
        engine.close()


def test_who_set_no_budget_is_not_kept_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a rank that computes for ever nor by one that sleeps for ever; what both used up is told."""
    for attribute in ("spins", "sleeps"):
        engine = ProcessesEngine()
        engine.run(request_for("honest"))  # workers are there, so that the limit is for the ranks' own calls
        monkeypatch.setattr(engine, "_limit", Limit(0.3))
        failure = failed(engine.run(request_for(attribute)))
        assert failure.kind == "no progress", failure.text
        assert "are more than the 0 s that a run may use up" in failure.text
        assert any(f"in {attribute}" in line for line in failure.ranks[1].stack)
        engine.close()


def test_what_a_rank_has_forked_ends_with_it(engine: ProcessesEngine) -> None:
    engine.run(request_for("forks"))
    rank = pids(engine)[1]
    (forked,) = (entry.pid for entry in leftovers.living() if entry.group == rank != entry.pid)
    engine.close()
    assert not is_alive(forked)


def test_a_worker_that_dies_before_all_have_come_is_told_and_not_waited_for() -> None:
    links = []

    def link(place: Place) -> LocalLink:
        links.append(LocalLink(place))
        if place.rank == 1:
            os.kill(links[1].pid, signal.SIGKILL)
        return links[-1]

    with pytest.raises(FsdpcheckError, match="the worker of rank 1 ended with -9 before its first run"):
        _pool.Pool(2, link)
    assert not any(is_alive(one.pid) for one in links)


def test_closing_reaps_every_worker_and_removes_what_they_shared() -> None:
    engine = ProcessesEngine()
    for world_size in (1, 3):
        engine.run(request_for("honest", world_size))
    workers, folders = pids(engine), [pool.folder for pool in engine._pools.values()]
    assert len(workers) == 4
    assert all(map(is_alive, workers))
    engine.close()
    assert not any(map(is_alive, workers))
    assert not any(folder.exists() for folder in folders)
    engine.close()


def test_an_interrupt_leaves_no_worker(engine: ProcessesEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.run(request_for("honest"))
    workers = pids(engine)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_pool.Pool, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.run(request_for("spins"))
    assert not any(map(is_alive, workers))
    assert engine.run(request_for("honest")).failure is None


def test_a_driver_that_dies_takes_its_workers_along(tmp_path: Path) -> None:
    """Also those that compute or hang in a collective for ever: a thread of each watches the driver."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase\n"
        "from fsdpcheck.engines.processes import ProcessesEngine\n"
        "from fsdpcheck.execution import RunRequest\n"
        "from fsdpcheck.processes import fork_server\n"
        "fork_server.fork()\n"
        "engine = ProcessesEngine()\n"
        "case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(2), BatchLayout('contiguous', 2))\n"
        "engine.run(RunRequest(case, sys.argv[1] + ':honest'))\n"
        "engine._pools[2].send(RunRequest(case, sys.argv[1] + ':spins'))\n"
        "Path(sys.argv[2]).write_text(' '.join(str(link.pid) for link in engine._pools[2].links))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    told = tmp_path / "pids"
    driver = zygote.start(program, [str(ADAPTERS), str(told)], [], f"{os.getpid()}.driver")
    assert driver.wait() == -9
    workers = [int(pid) for pid in told.read_text().split()]
    assert len(workers) == 2
    for pid in workers:
        _wait_until_gone(pid)


def _wait_until_gone(pid: int) -> None:
    """Return when the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        connection.wait([descriptor])
        os.close(descriptor)


def test_a_worker_that_another_has_reaped_is_known_to_be_dead() -> None:
    """multiprocessing says None of its exit for ever, and nobody would come back from waiting for it."""
    link = LocalLink.__new__(LocalLink)
    read, write = os.pipe()
    link._worker = SimpleNamespace(exitcode=None, sentinel=read)
    assert link.exit_code() is None
    os.close(write)
    assert link.exit_code() == -signal.SIGKILL
    os.close(read)
