"""Processes that are forked from a zygote are what programs would be that are started, and children of this one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.processes import leftovers, zygote
from fsdpcheck.processes.zygote import Forked, Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans and reads /proc")
TELL = """import json, os, signal, sys
answer = {
    "argv": sys.argv, "name": __name__, "leads": os.getsid(0) == os.getpid(), "parent": os.getppid(),
    "given": os.environ.get("GIVEN"), "mark": os.environ["FSDPCHECK_SESSION"], "folder": os.getcwd(),
    "begun": [one for one in open("/proc/self/environ").read().split("\\0") if one.startswith("FSDPCHECK_SESSION=")],
    "read": os.read(0, 1).decode(), "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "torch": "torch" in sys.modules,
    "files": [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
}
os.write(int(sys.argv[1]), json.dumps(answer).encode())
"""


@pytest.fixture(params=["forked", "program"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How processes are started: as here, or as where orphans cannot be adopted."""
    if request.param == "program":
        monkeypatch.setattr(leftovers, "can_adopt", lambda: False)
    return str(request.param)


def started(code: str, *arguments: str, files: tuple[int, ...] = (), mark: str = "a mark") -> Process:
    return zygote.start(code, arguments, files, mark)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def said(code: str, *arguments: str) -> dict[str, Any]:
    with pipe() as (read, write):
        process = started(code, str(write), *arguments, files=(write,))
        assert process.wait() == 0
        found: dict[str, Any] = json.loads(os.read(read, 1 << 16))
        assert set(found.pop("files")) == {0, 1, 2, write}
        return found


def test_a_process_is_the_same_whether_forked_or_a_program(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "something")
    monkeypatch.chdir(tmp_path)
    found = said(TELL, "more")
    assert found.pop("argv")[2:] == ["more"]
    assert found.pop("torch") is (way == "forked")
    assert found == {
        "begun": ["FSDPCHECK_SESSION=a mark"],
        **{"name": "__main__", "leads": True, "parent": os.getpid(), "given": "something", "mark": "a mark"},
        **{"folder": str(tmp_path), "read": "", "handler": True, "blocked": 0},
    }


def test_one_that_was_forked_has_its_zygote_by_a_fork() -> None:
    """Which forks processes as any other does, and ends with whoever has it."""
    code = (
        "import os, sys\nfrom fsdpcheck.processes import zygote\nzygote.fork()\nzygote._started = None\n"
        "given, write = sys.argv[1], int(sys.argv[2])\nos.write(write, b'%d ' % zygote.ready().pid)\n"
        "sys.exit(zygote.start(given, [str(write)], [write], 'another mark').wait())"
    )
    with pipe() as (read, write):
        process = started(code, TELL, str(write), files=(write,))
        assert process.wait() == 0
        number, _, told = os.read(read, 1 << 16).partition(b" ")
        found = json.loads(told)
        assert (set(found["files"]), found["torch"], found["leads"]) == ({0, 1, 2, write}, True, True)
        assert (found["mark"], found["parent"]) == ("another mark", process.pid)
        assert found["begun"] == ["FSDPCHECK_SESSION=another mark"]
    with suppress(ProcessLookupError):
        connection.wait([os.pidfd_open(int(number))])


def test_files_keep_their_numbers_whatever_these_are(way: str) -> None:
    """Each is where another was on its way."""
    code = "import os, sys\nfor word in sys.argv[1:]:\n    os.write(int(word), word.encode() + b' ')"
    with pipe() as (read, write):
        numbers = [257, 256, 300]
        assert not set(numbers) & set(map(int, os.listdir("/proc/self/fd")))
        for number in numbers:
            os.dup2(write, number)
        process = started(code, *map(str, numbers), files=tuple(numbers))
        for number in numbers:
            os.close(number)
        assert process.wait() == 0
        assert os.read(read, 100) == b"257 256 300 "


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        *(("pass", 0), ("raise SystemExit", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)),
        *(("import os; os._exit(5)", 5), ("import os; os.abort()", -signal.SIGABRT)),
    ],
)
def test_its_end_is_told(way: str, code: str, wanted: int, capfd: pytest.CaptureFixture[str]) -> None:
    process = started(code)
    assert process.wait() == process.returncode == wanted
    process.kill()  # it is gone, and its number is nobody's
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (code == "1 / 0")


@pytest.mark.nightly
def test_it_prints_where_this_process_reports_errors(
    way: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    started("import os; os.write(1, b'answer'); os.write(2, b', error'); print(', kept back', end='')").wait()
    assert capfd.readouterr() == ("", "answer, error, kept back")


def test_an_interrupt_reaches_it(way: str) -> None:
    with pipe() as (read, write):
        process = started(
            "import os, sys, time\nos.write(int(sys.argv[1]), b'!')\ntime.sleep(60)", str(write), files=(write,)
        )
        os.read(read, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait() in (130, -signal.SIGINT)


def test_what_it_forks_has_its_mark_and_no_others(way: str) -> None:
    """By which it is found in a session of its own; and what is started without the mark has none."""
    code = (
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    os.write(int(sys.argv[1]), b'%d' % os.getpid())\n"
        "    import time\n    time.sleep(60)\nelse:\n    os.wait()"
    )
    with pipe() as (read, write):
        process = started(code, str(write), files=(write,), mark="mine")
        other = int(os.read(read, 64))
    assert leftovers.environment(other).count(b"FSDPCHECK_SESSION=mine\0") == 1
    assert leftovers.end_marked("mine-not") == 0
    assert leftovers.clear(process.pid, "mine") == 1
    assert process.wait() == -signal.SIGKILL


def test_one_zygote_serves_an_environment_and_one_that_has_ended_is_done_without_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a module reads while it is imported is decided in the zygote; nothing reads ours there."""
    before = zygote.ready()
    assert before is not None
    assert isinstance(started("pass"), Forked)
    monkeypatch.setenv("FSDPCHECK_LIMIT_SECONDS", "7")
    assert zygote.ready() is before
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    other = zygote.ready()
    assert other is not None
    assert other is not before
    assert not before.runs
    other.interrupt()  # it imports still
    with monkeypatch.context() as patch:
        patch.setattr(zygote, "ready", lambda: other)
        process = started("raise SystemExit(7)")
    assert not isinstance(process, Forked)
    assert process.wait() == 7
    assert not other.runs
    monkeypatch.undo()
    after = zygote.ready()
    assert after is not None
    assert isinstance(started("pass"), Forked)
    os.kill(after.pid, signal.SIGKILL)
    assert started("raise SystemExit(7)").wait() == 7


@pytest.mark.nightly
def test_what_does_not_become_a_child_is_ended_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a system tells that it has orphans adopted, and forbids it."""
    forked, fork = list[int](), zygote.Zygote.fork
    monkeypatch.setattr(leftovers, "adopting", nullcontext)
    monkeypatch.setattr(zygote.Zygote, "fork", lambda *given: forked.append(fork(*given)) or forked[0])
    with pipe() as (read, write):
        process = started("import os, sys\nos.read(int(sys.argv[1]), 1)", str(read), files=(read,))
        assert not isinstance(process, Forked)
        (pid,) = forked
        with suppress(ProcessLookupError):
            connection.wait([os.pidfd_open(pid)])
        assert pid not in {entry.pid for entry in leftovers.living()}
        os.write(write, b"!")
        assert process.wait() == 0


@pytest.mark.nightly
def test_an_interrupt_while_a_process_is_started_ends_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would say later is no answer to the next question."""

    def interrupted(*given: object) -> bytes:
        raise KeyboardInterrupt

    before = zygote.ready()
    assert before is not None
    with monkeypatch.context() as patch:
        patch.setattr(zygote, "_received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            started("pass")
    assert not before.runs
    process = started("raise SystemExit(3)")
    assert isinstance(process, Forked)
    assert process.wait() == 3
