"""Sessions over several processes: the same verdicts as with one, whoever dies, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.processes import leftovers, zygote
from fsdpcheck.processes.limit import Limit
from fsdpcheck.session import child_process, supervisor, worker
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from tests.common.commands import LAWS as TOY_LAWS
from tests.common.commands import TOY, TOYS, environment

STEPLESS = f"{TOYS / 'stepless.py'}:Stepless"
LAWS = tuple(f"toy.{name}" for name in ("completes", "agrees", "small", "crashes", "secret", "broken"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[child_process.Child]:
    """The processes that were started; another is worth its start for each single check."""
    monkeypatch.setattr(supervisor, "_WORTH_A_PROCESS", 1)
    found: list[child_process.Child] = []
    start = child_process.Crew.start
    monkeypatch.setattr(child_process.Crew, "start", lambda *given: found.append(start(*given)) or found[-1])
    return found


def _plan(laws: tuple[str, ...]) -> Plan:
    return Plan((TOY,), laws, world_sizes=(1, 2), confirm=False, laws_from=(TOY_LAWS,))


def _session(laws: tuple[str, ...], jobs: int, adapters: tuple[str, ...] = (TOY,)) -> tuple[Ledger, list[str]]:
    told = []

    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        told.append(event["event"])

    plan = Plan(adapters, laws, world_sizes=(1, 2), confirm=False, laws_from=(TOY_LAWS,))
    return supervisor.supervise(plan, listen, jobs), told


def _without_times(ledger: Ledger) -> list[Verdict]:
    return [replace(verdict, seconds=0.0) for verdict in ledger.verdicts.values()]


@pytest.mark.nightly
def test_any_number_of_processes_gives_the_same_verdicts(started: list[child_process.Child]) -> None:
    alone, _ = _session(LAWS, 1)
    assert len(started) == 2, "one, and one more after the crash"
    together, told = _session(LAWS, 3)
    assert len(started) - 2 in (3, 4), "three, and one more if something was left after the crash"
    assert _without_times(alone) == _without_times(together)
    assert [law for law, _ in together.verdicts] == list(LAWS)
    assert [told[0], told[-1], told.count("plan"), told.count("end")] == ["plan", "end", 1, 1]
    assert all(child.process.returncode is not None for child in started)


def test_a_worker_closes_its_pipes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python would, and warn of it, which a user may have made an error. That the parent is gone is none."""
    monkeypatch.setattr(worker, "faulthandler", SimpleNamespace(enable=lambda all_threads: None))
    monkeypatch.setattr(worker, "_follow_parent_into_death", lambda pipe: None)
    monkeypatch.setattr(worker, "Interrupt", lambda: SimpleNamespace(again=lambda: None, deferred=nullcontext))
    monkeypatch.setattr(worker, "told_session", lambda plan, emit, pairs: emit({"event": "note"}) or {"event": "end"})
    for reader_is_gone in (False, True):
        (told, write), (read, feed) = os.pipe(), os.pipe()
        monkeypatch.setattr(sys, "argv", ["", str(write), str(read), "-1", Plan(("reference",)).to_json()])
        if reader_is_gone:
            os.close(told)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            assert worker.main() == (130 if reader_is_gone else 0)
        assert [str(one.message) for one in warned] == []
        for descriptor in (write, read):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        for descriptor in (feed, *([] if reader_is_gone else [told])):
            os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_ends_with_all_that_it_has_started(
    started: list[child_process.Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that were forked hold the pipe to the session open; nobody waits for its end."""
    monkeypatch.setenv("TOY_LITTER", str(tmp_path / "litter"))
    monkeypatch.setattr(child_process, "_LEAVING_SECONDS", float("inf"))
    zygote.ready()
    before = leftovers.children()
    ledger, _ = _session(("toy.litters",), 1)
    assert [verdict.status for verdict in ledger.verdicts.values()] == ["holds"]
    assert [child.process.returncode for child in started] == [0], "it ended by itself, thread or not"
    left = {int(pid) for pid in (tmp_path / "litter").read_text().split()}
    assert len(left) == 3
    assert not left & {entry.pid for entry in leftovers.living()}
    assert leftovers.children() == before


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_never_comes_back_is_no_progress(
    started: list[child_process.Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps where no engine looks; what its adapter is still to be asked is left out."""
    monkeypatch.setattr(child_process, "_LOOK_SECONDS", 0.05)

    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "case":
            started[0].watched(Limit(0.1))

    plan = _plan(("toy.waits", "toy.litters"))
    ledger = supervisor.supervise(plan, listen, 1)
    waits, vain = ledger.verdicts.values()
    assert waits.reason.startswith("no progress: 0 s of processor time and ")
    assert "in waits" in waits.reason
    assert "replay with: fsdpcheck replay 'v2:" in waits.reason
    assert vain.reason == "not checked: its ranks made no progress in toy.waits"
    assert (waits.exit_code, vain.exit_code, ledger.exit_code) == (4, 4, 4)
    assert [child.process.returncode for child in started] == [-signal.SIGKILL]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_c_code_that_lets_no_python_run_is_asleep_though_others_ask_for_the_interpreter(
    started: list[child_process.Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask two hundred times a second, so that no thread of theirs is asleep for long: it went on for hours."""
    monkeypatch.setattr(child_process, "_LOOK_SECONDS", 0.05)

    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "case":
            started[0].watched(Limit(0.6))

    ledger = supervisor.supervise(_plan(("toy.keeps",)), listen, 1)
    (keeps,) = ledger.verdicts.values()
    assert keeps.reason.startswith("no progress: 0 s of processor time and 1 s in which no rank used any")
    assert keeps.exit_code == 4


def test_a_process_that_waits_for_work_may_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fsdpcheck" / "session").mkdir(parents=True)
    (tmp_path / "fsdpcheck" / "__init__.py").touch()
    (tmp_path / "fsdpcheck" / "session" / "worker.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(zygote, "ready", lambda: None)  # what is forked has the right fsdpcheck
    child = child_process.Child(0, "main", ())
    child.watched(Limit())
    spent = SimpleNamespace(is_due=True, look=lambda: True, exceeded="much")
    monkeypatch.setattr(child.watch, "_spent", spent)
    monkeypatch.setattr(child.watch, "_told_stacks", lambda: "stacks")
    assert child.never_came_back().endswith("stacks")
    child.idle = True
    assert child.never_came_back() == ""
    child.give("work")
    assert not child.idle
    connection.wait([child.exit])
    with subprocess.Popen(["sleep", "60"]) as other:
        child.death()
        assert other.poll() is None, "a child of ours that the dead one did not start"
        other.kill()


def test_an_adapter_that_ends_its_process_at_its_import_is_at_fault(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\nos._exit(0)\n")
    ref = f"{tmp_path / 'leaves.py'}:adapter"
    ledger, _ = _session(("*",), 1, (ref,))
    assert ledger.exit_code == 2
    assert ledger.errors[0][0].startswith(f"adapter {ref!r} ended the process that imported it: it exited with code 0")


@pytest.mark.nightly
def test_few_checks_are_no_reason_for_a_second_process(
    started: list[child_process.Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_WORTH_A_PROCESS", 3)
    ledger, _ = _session(("toy.completes", "toy.agrees", "toy.small", "toy.secret"), 8)
    assert len(ledger.verdicts) == 4
    assert len(started) == 1, "three of the four are promised"


@pytest.mark.nightly
def test_an_adapter_that_cannot_take_a_step_is_asked_no_further_by_any(started: list[child_process.Child]) -> None:
    """Nor is a process sent home that has to wait for what is asked first."""
    ledger, _ = _session(
        ("training.plain", "collectives.plain", "invariance.world", "invariance.units"), 3, (STEPLESS,)
    )
    assert [(verdict.status, verdict.exit_code) for verdict in ledger.verdicts.values()] == [("error", 2)] * 4
    left_out = {law for (law, _), verdict in ledger.verdicts.items() if verdict.reason.startswith("not checked")}
    assert left_out == {"invariance.world", "invariance.units"}
    assert all(child.process.returncode == 0 for child in started)


def test_a_process_that_dies_outside_any_case_stops_the_session(
    started: list[child_process.Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it has its first work; the other has not even begun and is sent home."""
    give = child_process.Child.give

    def kill_the_first(child: child_process.Child, data: object) -> None:
        if child.number == 0:
            child.process.kill()
        give(child, data)

    monkeypatch.setattr(child_process.Child, "give", kill_the_first)
    ledger, _ = _session(LAWS[:3], 2)
    assert ledger.exit_code == 3
    assert ledger.errors[0][0] == "the checking process died outside any case: it was ended by SIGKILL"
    assert [child.process.returncode for child in started] == [-9, 0]


def test_an_interrupt_ends_every_process(started: list[child_process.Child]) -> None:
    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "case" and event["law"] == "toy.waits":
            os.kill(os.getpid(), signal.SIGINT)

    plan = _plan(("toy.completes", "toy.waits"))
    ledger = supervisor.supervise(plan, listen, 2)
    assert ledger.interrupted
    assert ledger.exit_code == 130
    assert len(started) == 2
    assert [child.process.returncode for child in started] == [0, 0], "each cleaned up and told its end"


def test_an_interrupt_before_a_process_listens_for_it_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fsdpcheck" / "session").mkdir(parents=True)
    (tmp_path / "fsdpcheck" / "__init__.py").touch()
    (tmp_path / "fsdpcheck" / "session" / "worker.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(zygote, "ready", lambda: None)  # what is forked has the right fsdpcheck
    child = child_process.Child(0, "main", ())
    connection.wait([child.exit])
    assert child.death() == "it exited with code 130 (os._exit, or a library that ends the process)"
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_python_swallows_ends_the_session_all_the_same() -> None:
    ledger, told = _session(("toy.swallows",), 1)
    assert ledger.exit_code == 130
    assert not ledger.verdicts
    assert told.count("case") == 2, "the one that it came in, and the next, where it was seen"


def test_an_interrupt_before_the_plan_is_told_starts_nobody(started: list[child_process.Child]) -> None:
    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "plan":
            os.kill(os.getpid(), signal.SIGINT)

    ledger = supervisor.supervise(_plan(LAWS), listen, 3)
    assert ledger.exit_code == 130
    assert len(started) == 1


def test_a_listener_that_raises_leaves_no_process_behind(started: list[child_process.Child]) -> None:
    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "case":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        supervisor.supervise(_plan(("toy.waits",)), listen, 1)
    assert [child.process.returncode for child in started] == [-signal.SIGKILL]


def test_a_case_that_never_ends_outlives_its_parent_by_nothing() -> None:
    """Also when the parent is killed: nothing is told any more, so no write would fail."""
    program = (
        "import os, signal\n"
        "from fsdpcheck.session.plan import Plan\n"
        "from fsdpcheck.session.supervisor import supervise\n"
        "def listen(ledger, event):\n"
        "    if event['event'] == 'case':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"supervise(Plan.from_json({_plan(('toy.waits',)).to_json()!r}), listen)\n"
    )
    read, write = os.pipe()  # a process that inherits the end for writing keeps it open for as long as it lives
    parent = subprocess.run([sys.executable, "-c", program], stderr=write, env=environment(), check=False)
    os.close(write)
    with os.fdopen(read) as pipe:
        pipe.read()
    assert parent.returncode == -signal.SIGKILL
