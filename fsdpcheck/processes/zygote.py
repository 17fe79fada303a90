"""Zygote: a process that has imported what workers need, runs nothing itself, and is forked for each of them.

To import torch takes seconds and a fork takes none: a worker that stands in for a dead one is there at once, and many
cost one import. What is forked becomes a child of this process (Linux' child subreapers); where the system has none, or
the zygote fails, a program is started instead, which imports everything itself.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from fsdpcheck.compat import multiprocessing_private
from fsdpcheck.processes import fork_server, leftovers

_STDERR: Final = 2
_JUDGES: Final = "fsdpcheck.session.preload"
"""What workers of sessions import besides, Hypothesis for one."""
_MOST_FILES: Final = 16
_LENGTH: Final = 8
"""Bytes that hold the length of what follows them."""
_UNREAD: Final = ("PYTEST_CURRENT_TEST", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES")
_OURS: Final = "FSDPCHECK_"
"""Variables that nothing reads while it is imported; a process that differs in others has another zygote."""
_BOOT: Final = """import json, sys
sys.path[:] = json.loads(sys.argv.pop())
try:
    from fsdpcheck.processes.zygote import serve
    serve(int(sys.argv[1]))
except (ImportError, KeyboardInterrupt):  # a worker reports what it cannot import
    sys.exit(1)"""


class Process(Protocol):
    """What is known of a process that was started: as of subprocess.Popen."""

    pid: int
    returncode: int | None

    def wait(self) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


class _Runs(Process, Protocol):
    """One of which it can be asked whether it runs."""

    def poll(self) -> int | None: ...


_zygotes: dict[tuple[tuple[str, str], ...], Zygote] = {}
"""The one that there is, if there is one, by its environment."""


@dataclass
class Forked:
    """A process that was forked from the zygote, and is a child of this one."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Its exit code, below 0 the signal that ended it. Waits for it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit code as of ``wait``, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)


def start(code: str, arguments: Sequence[str], files: Sequence[int], mark: str) -> Process:
    """A process that runs ``code`` with ``arguments`` in ``sys.argv``, and leads a session of its own.

    It has this one's environment with ``mark`` (see leftovers.py), and ``files`` under the same numbers. Nobody can be
    asked there: to read from a terminal would be to wait for ever. What it prints is no answer, and goes to stderr.
    """
    zygote, environment = ready(), {**_environment(), leftovers.MARK: mark}
    if zygote is not None:
        with suppress(OSError), leftovers.adopting():
            return _own(zygote.fork(code, arguments, files, environment))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        env=environment,
        start_new_session=True,
    )


def _own(pid: int) -> Forked:
    """What was forked, if it is a child of this process; otherwise it is ended. Raises ChildProcessError."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        os.kill(pid, signal.SIGKILL)
        raise
    return Forked(pid)


def ready() -> Zygote | None:
    """The zygote of processes with this one's environment, which is started if need be; it may fail later.

    It imports the fsdpcheck and the torch of this process. Where those that are forked look for others, they are told.
    """
    if not leftovers.can_adopt():
        return None
    kept = _read_environment()
    key = tuple(kept.items())
    if key not in _zygotes or not _zygotes[key].runs:
        close()
        _zygotes[key] = Zygote(kept, _started)
    return _zygotes[key]


def fork() -> None:
    """Make the zygote a fork of this process, which was forked from one and has imported and started nothing since.

    Otherwise a process that begins sessions, a user's pytest say, starts it as a program that imports everything again.
    """
    kept = _read_environment()
    _zygotes[tuple(kept.items())] = Zygote(kept, _forked_from_here)


@atexit.register
def close() -> None:
    """End the zygote; what was forked from it goes on."""
    while _zygotes:
        _zygotes.popitem()[1].close()


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _read_environment() -> dict[str, str]:
    """What of it may be read while modules are imported."""
    pairs = sorted(_environment().items())
    return {name: value for name, value in pairs if name not in _UNREAD and not name.startswith(_OURS)}


def _started(asker: socket.socket, environment: Mapping[str, str]) -> _Runs:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, str(asker.fileno()), json.dumps(sys.path)],
        pass_fds=[asker.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        env={**environment, leftovers.MARK: leftovers.ROOM},
        start_new_session=True,
    )


def _forked_from_here(asker: socket.socket, environment: Mapping[str, str]) -> _Runs:
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            multiprocessing_private.close_files_but({0, 1, _STDERR, asker.fileno()})
            leftovers.mark(leftovers.ROOM)
            os.environ.clear()
            os.environ.update({**environment, leftovers.MARK: leftovers.ROOM})
            serve(asker.detach())
        finally:
            os._exit(1)
    return Forked(pid)


class Zygote:
    """The process, from this one's side."""

    def __init__(
        self, environment: Mapping[str, str], begin: Callable[[socket.socket, Mapping[str, str]], _Runs]
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = begin(theirs, environment)
        self.pid: Final = self._process.pid

    def fork(self, code: str, arguments: Sequence[str], files: Sequence[int], environment: Mapping[str, str]) -> int:
        """The number of a new process (see ``start``). Raises OSError where there is none; then it has ended."""
        told = json.dumps([code, list(arguments), list(files), dict(environment), os.getcwd()]).encode()
        try:
            self._socket.sendall(len(told).to_bytes(_LENGTH))
            socket.send_fds(self._socket, [told[:1]], [*files, _STDERR])
            self._socket.sendall(told[1:])
            return int.from_bytes(_received(self._socket, _LENGTH))
        except BaseException:  # an answer that comes later would be taken for that to the next question
            self.close()
            raise

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        """End it if it still imports; once it is there, nothing interrupts it."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End it. May be called twice."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _received(source: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = source.recv(length - len(data))
        if not more:
            raise ConnectionError("the zygote is gone")
        data += more
    return data


def serve(descriptor: int) -> None:
    """The whole life of the zygote: fork for each request, until nobody is left to ask."""
    gc.disable()  # to import makes no garbage, and to look for it takes a fifth of the time
    with suppress(Exception):  # a worker reports what it cannot import
        fork_server.preload()
        importlib.import_module(_JUDGES)
    multiprocessing_private.keep_to_the_end()
    gc.freeze()  # the collector of what is forked would write to each page that is shared
    gc.enable()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # and not ignored: it may come for one that was forked
    with socket.socket(fileno=descriptor) as asker, suppress(ConnectionError):
        while True:
            length = int.from_bytes(_received(asker, _LENGTH))
            first, files, _, _ = socket.recv_fds(asker, 1, _MOST_FILES)
            request = json.loads(first + _received(asker, length - 1))
            pid = _forked(asker, files, request)
            for file in files:
                os.close(file)
            asker.sendall(pid.to_bytes(_LENGTH))


def _forked(asker: socket.socket, files: Sequence[int], request: Any) -> int:
    """The number of a process that no parent of its own is left to, so that it goes to whoever asked for it."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            while os.getppid() == parent:  # which ends at once; an end of its files would come before its children go
                os.sched_yield()
            for descriptor in (read, write):
                os.close(descriptor)
            asker.close()
            _run(files, *request)
        os.write(write, pid.to_bytes(_LENGTH))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read(_LENGTH)
    os.waitpid(between, 0)
    return int.from_bytes(told)


def _run(
    files: Sequence[int],
    code: str,
    arguments: Sequence[str],
    numbers: Sequence[int],
    environment: dict[str, str],
    folder: str,
) -> NoReturn:
    """The whole life of what was forked."""
    result: Any = 1
    try:
        os.setsid()
        _place(files, [*numbers, _STDERR])
        leftovers.mark(environment[leftovers.MARK])
        os.environ.clear()
        os.environ.update(environment)
        with suppress(OSError):
            os.chdir(folder)
        sys.argv[:] = ["-c", *arguments]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        exec(code, {"__name__": "__main__"})
        result = 0
    except KeyboardInterrupt:
        result = 130
    except SystemExit as end:
        result = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(result if isinstance(result, int) else int(result is not None))


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors ``files`` these numbers, nothing to stdin, and stderr to stdout."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]  # out of the way of those numbers
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(_STDERR, 1)
