"""Remote: a process of ours that answers questions one at a time, and may die of what it runs for them.

Questions and answers are plain data (processes/messages.py). What the process prints appears in this one's stderr. It
is killed with its parent, and with it whatever it has started in its process group.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from fsdpcheck import errors
from fsdpcheck.compat import frames_private
from fsdpcheck.errors import FsdpcheckError, NoProgress, UsageError, excerpt
from fsdpcheck.processes import fork_server, leftovers, messages
from fsdpcheck.processes.limit import TIMES_THE_LONGEST, Limit, beat_into, limit_seconds
from fsdpcheck.processes.watch import MORE_THAN_A_RUN, STACKS, Watch

Answer = Callable[[Any], bytes]
"""What the process runs for each question, which gives a message."""
Back = Callable[[Any], Any]
"""By it an answer asks whoever asked; ``make(back) -> Answer`` of the module that a Remote names takes it."""

_LOOK_SECONDS: Final = 1.0
"""From one look at what the process has used up to the next."""
_LAST_LINES: Final = 12
"""Of what it printed, that are told when it dies."""
_FATAL: Final = "Fatal Python error"


class Died(FsdpcheckError):
    """The process ended in the middle of a question; what it was ended by, and what it wrote last."""


class Unexpected(FsdpcheckError):
    """What answers raised an error that is none of ours; its traceback."""


@dataclass(frozen=True)
class _Raised:
    """An error of ours that a question met, as data."""

    kind: str
    text: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class _Back:
    """What an answer asks of whoever asked, who waits for it."""

    question: Any


def _nobody(question: Any) -> object:
    raise UsageError(f"an answer asks {question!r} of one who answers nothing")


class Remote:
    """One such process: ``ask(question)``, until it dies or is closed.

    ``module``: dotted name of what has ``make(back) -> Answer``. ``preload``: what the fork server imports besides.
    """

    def __init__(self, module: str, preload: Sequence[str] = ()) -> None:
        context = fork_server.context(preload)
        self._folder = Path(tempfile.mkdtemp(prefix=leftovers.folder_prefix()))
        self._files = _Files(self._folder)
        self._read, self._due = 0, False
        self._log, self._beats, self._stacks = (os.open(path, os.O_RDONLY | os.O_CREAT) for path in self._files.all)
        self._limit = Limit(MORE_THAN_A_RUN * limit_seconds(), MORE_THAN_A_RUN * TIMES_THE_LONGEST)
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(module, theirs, self._files), daemon=True)
        with fork_server.without_main():
            self._process.start()
        theirs.close()
        self.is_open = True

    def ask(self, question: object, serve: Callable[[Any], object] = _nobody) -> Any:
        """What is answered. Raises Died, NoProgress (it was ended, for it never came back), NotPlain, Unexpected, and
        the errors of ours that the question met. After Died, NoProgress or an interrupt it is closed.

        ``serve``: what an answer is given that asks back; what that raises is raised where it asked.
        """
        self.send(question)
        while isinstance(found := self.answer(), _Back):
            try:
                payload = _answered(lambda asked: messages.dumps(serve(asked)), found.question)
            except BaseException:
                self.close()
                raise
            self._send(payload)
        return found

    def send(self, question: object) -> None:
        """Ask without waiting; ``answer`` is to be called next."""
        assert not self._due, "asked before the last answer was read, which would be taken for this one's"
        self._due = True
        self._send(messages.dumps(question))

    def _send(self, payload: bytes) -> None:
        try:
            self._pipe.send_bytes(payload)
        except ConnectionError:  # it has died meanwhile: ``answer`` tells
            self._process.join()

    def answer(self) -> Any:
        """Wait for the answer to what was sent. Raises what ``ask`` raises."""
        self._due = False
        try:
            found = messages.loads(self._awaited())
        except BaseException:
            self.close()
            raise
        self._show()
        if isinstance(found, _Raised):
            raise _error(found)
        return found

    def close(self) -> None:
        """Kill it with what it has started, and reap it. May be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        self._process.kill()
        leftovers.end_group(self._process.pid)
        self._process.join()
        self._show()
        self._pipe.close()
        for descriptor in (self._log, self._beats, self._stacks):
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _awaited(self) -> bytes:
        watch = Watch(self._process.pid, self._limit, self._beats, self._stacks, _LOOK_SECONDS)
        while True:
            connection.wait([self._pipe, self._process.sentinel], _LOOK_SECONDS)
            try:
                if self._pipe.poll():
                    payload = self._pipe.recv_bytes()
                    self._limit.learn(watch.seconds)
                    return payload
            except (EOFError, ConnectionError):
                self._process.join()
            if self._process.exitcode is not None:
                raise Died(_death(self._process.exitcode) + self._last_words())
            if why := watch.never_came_back():
                raise NoProgress(why)

    def _show(self) -> None:
        """Pass on what it has printed since the last time."""
        if printed := self._printed():
            self._read += len(printed)
            sys.stderr.write(printed.decode(errors="replace"))

    def _printed(self) -> bytes:
        return os.pread(self._log, os.fstat(self._log).st_size - self._read, self._read)

    def _last_words(self) -> str:
        """What it printed when it died, which is not passed on besides: where it was in user's code, and the end."""
        printed = self._printed()
        self._read += len(printed)
        before, fatal, stack = printed[-8 * excerpt.MOST :].decode(errors="replace").rpartition(_FATAL)
        if not fatal:
            lines = stack.splitlines()[-_LAST_LINES:]
        else:
            lines = [*before.splitlines()[-_LAST_LINES:], *(fatal + stack.partition("\n\nExtension")[0]).splitlines()]
            lines = [line for line in lines if not _is_plumbing(line)]
        return excerpt.excerpt("\n".join(["", "it wrote last:", *lines])) if lines else ""


def _is_plumbing(line: str) -> bool:
    """Whether a line of a stack is about the harness, torch or Python's threads."""
    found = re.match(r'\s*File "(.+)", line \d+ in ', line)
    return found is not None and (frames_private.is_plumbing(found[1]) or found[1].endswith("threading.py"))


@dataclass(frozen=True)
class _Files:
    """What both sides know by path: what it prints, its beats and its stacks."""

    folder: Path

    @property
    def all(self) -> tuple[Path, Path, Path]:
        return self.folder / "log", self.folder / "beats", self.folder / "stacks"


def _death(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code} (os._exit, or a library that ends the process)"
    known = {number.value: number.name for number in signal.Signals}
    return f"it was ended by {known.get(-code, f'signal {-code}')}"


def _error(found: _Raised) -> FsdpcheckError:
    kind = getattr(errors, found.kind, Unexpected)
    error: FsdpcheckError = kind.__new__(kind, found.text)
    error.args = (found.text,)
    vars(error).update(found.fields)
    return error


def _serve(module: str, pipe: Connection, files: _Files) -> None:
    """The whole life of the process."""
    os.setpgid(0, 0)  # what it forks is in its group, and ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    fork_server.follow_parent_into_death(files.folder)
    log, beats, stacks = (os.open(path, os.O_WRONLY | os.O_APPEND * (path == files.all[0])) for path in files.all)
    for standard in (1, 2):
        os.dup2(log, standard)
    faulthandler.enable(all_threads=False)
    faulthandler.register(STACKS, stacks)
    beat_into(beats)

    def back(question: Any) -> Any:
        pipe.send_bytes(messages.dumps(_Back(question)))
        found = messages.loads(pipe.recv_bytes())
        if isinstance(found, _Raised):
            raise _error(found)
        return found

    answer: Answer = importlib.import_module(module).make(back)
    while True:
        payload = _answered(answer, messages.loads(pipe.recv_bytes()))
        sys.stdout.flush()
        pipe.send_bytes(payload)


def _answered(answer: Answer, question: object) -> bytes:
    try:
        return answer(question)
    except FsdpcheckError as error:
        is_known = getattr(errors, type(error).__name__, None) is type(error)
        kind, fields = (type(error).__name__, vars(error)) if is_known else ("", {})
        return messages.dumps(_Raised(kind, str(error), fields))
    except Exception:
        return messages.dumps(_Raised("", excerpt.excerpt(traceback.format_exc().rstrip(), excerpt.WHOLE), {}))
