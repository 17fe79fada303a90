"""A process that a supervised session runs in: arguments FD FEED BEATS PLAN, events as lines of JSON to the pipe FD.

What it is to check comes from the pipe FEED, a line [law, adapter] at a time; the end of FEED is the end of its work.

Everything that may crash, hang or print happens here; the parent (session/supervisor.py) stays light and survives.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from os import _exit  # now, whatever an implementation makes of it
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from fsdpcheck import adapters
from fsdpcheck.errors import INTERNAL, FsdpcheckError, NoSuchLaw
from fsdpcheck.errors.excerpt import WHOLE, excerpt
from fsdpcheck.findings import tokens
from fsdpcheck.processes import fork_server, leftovers
from fsdpcheck.session.plan import Plan

if TYPE_CHECKING:
    from fsdpcheck.engines.base import Engine
    from fsdpcheck.session.run import Emit
    from fsdpcheck.session.work_queue import Pair


def main() -> int:
    """Run the session; returns the process's exit code, which the parent only needs when the pipe ended early."""
    faulthandler.enable(all_threads=False)
    interrupt = Interrupt()
    with interrupt.deferred():
        fork_servers_of(Plan.from_json(sys.argv[4]).adapters)
    _follow_parent_into_death(int(sys.argv[1]))
    with (
        suppress(BrokenPipeError),  # when the pipe is closed and the parent is gone
        os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as pipe,
        os.fdopen(int(sys.argv[2]), encoding="utf-8") as feed,
    ):
        return _served(pipe, feed, interrupt)
    return 130


def _served(pipe: TextIO, feed: TextIO, interrupt: Interrupt) -> int:
    """The session of the plan in the arguments, told through ``pipe``; the pairs come from ``feed``."""
    pairs = ((law, adapter) for law, adapter in map(json.loads, feed))

    me = os.getpid()

    def tell(event: dict[str, Any]) -> None:
        if os.getpid() != me:  # a forked child of the implementation came back to us
            _exit(1)
        try:
            pipe.write(json.dumps(event) + "\n")
        except BrokenPipeError:  # the parent is gone, and so is everybody who would read on
            raise KeyboardInterrupt from None

    def emit(event: dict[str, Any]) -> None:
        tell(event)
        interrupt.again()

    try:
        _beat_into(int(sys.argv[3]))
        tell(told_session(Plan.from_json(sys.argv[4]), emit, pairs))
    except KeyboardInterrupt:
        return 130
    return 0


def replay() -> int:
    """Run the case of one trusted token: FD FEED BEATS TOKEN ENGINE BUDGET LAWS; one event, a verdict or error."""
    faulthandler.enable(all_threads=False)
    Interrupt()
    token, engine, (budget, laws) = tokens.decode(sys.argv[4]), sys.argv[5], map(json.loads, sys.argv[6:8])
    fork_servers_of([token.adapter])
    _follow_parent_into_death(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as pipe:
        try:
            from fsdpcheck.session import run

            gc.freeze()  # see told_session
            _beat_into(int(sys.argv[3]))
            verdict = run.replayed(token, engine, budget, tuple(laws))
            event: dict[str, Any] = {"event": "verdict", **verdict.to_data()}
        except KeyboardInterrupt:
            return 130
        except FsdpcheckError as error:
            event = {"event": "error", "text": excerpt(str(error), WHOLE), "exit_code": error.exit_code}
        except Exception:
            event = {"event": "error", "text": excerpt(traceback.format_exc().rstrip(), WHOLE), "exit_code": INTERNAL}
        pipe.write(json.dumps(event) + "\n")
    return 0


def examine() -> int:
    """Examine what works here (see session.examination): FD FEED BEATS ADAPTERS; its events, and one "end"."""
    faulthandler.enable(all_threads=False)
    Interrupt()
    refs = json.loads(sys.argv[4])
    fork_servers_of(refs)
    _follow_parent_into_death(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as pipe:
        try:
            from fsdpcheck.session import examination

            _beat_into(int(sys.argv[3]))
            examination.examine(refs, lambda event: print(json.dumps(event), file=pipe))
        except KeyboardInterrupt:
            return 130
        except Exception:  # a torch that cannot be imported, say
            text = excerpt(traceback.format_exc().rstrip(), WHOLE)
            print(json.dumps({"event": "error", "problem": text, "code": INTERNAL}), file=pipe)
        print(json.dumps({"event": "end"}), file=pipe)
    return 0


def fork_servers_of(refs: Iterable[str]) -> None:
    """Have processes of ranks forked from this one as it is now, unless they need what takes long to import.

    multiprocessing's own server has that imported, and is started when it is first needed.
    """
    if not any(map(adapters.needs_extra, refs)):
        fork_server.fork()


def _beat_into(descriptor: int) -> None:
    """Note there that this process goes on, when its engines look whether their ranks do."""
    from fsdpcheck.processes.limit import beat_into

    beat_into(descriptor)


def leave(code: int) -> NoReturn:
    """End this process with what is registered for its exit, and without waiting for threads that somebody left."""
    for process in multiprocessing.active_children():
        process.kill()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    _exit(code)


def told_session(
    plan: Plan, emit: Emit, pairs: Iterable[Pair] | None = None, engine: Engine | None = None
) -> dict[str, Any]:
    """Run a session (see session.run_session), errors as events; returns the last event, for the caller to emit."""
    interrupted = False
    try:
        from fsdpcheck.session import run  # here, so that a broken torch is reported like any other error

        gc.freeze()  # Hypothesis collects garbage where it begins, and would look for it among torch's own modules
        run.run_session(plan, emit, pairs, engine)
    except KeyboardInterrupt:
        interrupted = True
    except FsdpcheckError as error:
        about = {"glob": error.glob} if isinstance(error, NoSuchLaw) else {}
        emit({"event": "error", "text": excerpt(str(error), WHOLE), "exit_code": error.exit_code, **about})
    except Exception:
        emit({"event": "error", "text": excerpt(traceback.format_exc().rstrip(), WHOLE), "exit_code": INTERNAL})
    finally:
        gc.unfreeze()  # a rank of torchrun ends as Python does, and triton's binding reports what is kept then
    return {"event": "end", "interrupted": interrupted}


def _follow_parent_into_death(pipe: int) -> None:
    """End, with all that was started, when nobody is left to read from ``pipe``, even in a case that never ends."""
    poll = select.poll()
    poll.register(pipe, 0)  # errors are always told

    def watch() -> None:
        poll.poll()
        leftovers.clear(os.getpid(), os.environ.get(leftovers.MARK, ""))
        _exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


class Interrupt:
    """A signal raises KeyboardInterrupt once: the terminal and the parent both send it, and cleaning up is not redone.

    Where Python calls something by itself (a callback of the collector, __del__) it swallows what is raised there, and
    the session would go on; hence ``again``.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        """``numbers``: which signals do; () stands for SIGINT."""
        self._came = self._is_deferred = False
        self._numbers = numbers or (signal.SIGINT,)
        for number in self._numbers:
            signal.signal(number, self._raise)

    def again(self) -> None:
        """Raise KeyboardInterrupt if it was raised before."""
        if self._came:
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What comes within it is raised by ``again``: imports that it cuts short would fail later."""
        self._is_deferred = True
        yield
        self._is_deferred = False

    def _raise(self, number: int, frame: object) -> None:
        for each in self._numbers:
            signal.signal(each, signal.SIG_IGN)
        self._came = True
        if not self._is_deferred:
            raise KeyboardInterrupt
