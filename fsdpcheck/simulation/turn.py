"""A rank's turn among its own threads: who has it, who waits for it, and when the rank itself is blocked (turns.py)."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

import torch

from fsdpcheck.compat import frames_private, groups_private
from fsdpcheck.simulation.current_rank import here
from fsdpcheck.simulation.decisions import Decisions
from fsdpcheck.simulation.executors import Executors
from fsdpcheck.simulation.scheduler import Aborted, Baton, where
from fsdpcheck.simulation.stragglers import VOID, Stragglers
from fsdpcheck.simulation.thread_order import NOT_SETTLED, Caller, Standstill, ThreadOrder, TurnLock

SIDE_BY_SIDE: Final = "several threads of a rank ran at once; what they do to each other between calls is not searched"


@dataclass(frozen=True, eq=False)
class _Blocked:
    """A thread that is blocked in a call, and may go on when ``until()``."""

    until: Callable[[], bool]


class Turn:
    """A rank's turn among its own threads. ``refused`` is told what one of them raises, and may fail the run for it."""

    def __init__(
        self,
        rank: int,
        baton: Baton,
        voids: set[str],
        refused: Callable[[int, BaseException], object],
        stragglers: Stragglers,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        decisions: Decisions | None = None,
    ) -> None:
        """``around``: what is open on each thread that is this rank. ``decisions``: of a run that is decided."""
        self._rank, self._baton, self._voids, self._refused = rank, baton, voids, refused
        self._stragglers, self._around = stragglers, around
        self.running: dict[int, str] = {}
        """By the system's number of its thread, what the rank started and waits for, in words: no daemons."""
        self._news, self._may_leave = threading.Event(), False
        self._lock = TurnLock()
        self._order = None if decisions is None else ThreadOrder(rank, decisions, self._lock)
        self._standstill, self._own = Standstill(), (threading.get_ident(), threading.get_native_id())
        self._blocked: list[_Blocked] = []
        self._started = Counter[str]()
        self._threads: list[threading.Thread] = []
        self._daemons: list[threading.Thread] = []
        self._told: dict[threading.Thread, str] = {}
        self._tasks: list[concurrent.futures.Future[Any]] = []
        self._over = False
        self.executors = Executors()
        self._unjoined, self._several = WeakSet[threading.Thread](), False

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """While open, the rank's own thread waits and its other threads may call. May raise Aborted at the end."""
        woken = None if self._order is None else Caller(here.thread, (), where(sys._getframe(3)), woken=True)
        self._let_go()
        try:
            yield
        finally:
            if not self._acquire(woken) and woken is not None and self._order is not None and self._order.is_late:
                self._order.let_others_go_first(woken, self._settled)
            self._baton.stands(self._rank, *self._own)
        if self._baton.aborting:
            raise Aborted

    def _let_go(self) -> None:
        """Let another thread have the turn: one that wants it, or else one that is blocked, which sees to the rank."""
        self._lock.release(self._blocked[0] if self._blocked and not self._lock.wanted else None)

    def block(self, until: Callable[[], bool], sleep: Callable[[], None]) -> None:
        """Let this thread, which has the turn, be blocked in a call; the rank's other threads go on.

        The rank is blocked, by ``sleep``, when none of its threads can do anything more. May raise Aborted."""
        if not self.has_others:
            sleep()
            return
        me = _Blocked(until)
        self._blocked.append(me)
        try:
            while not until():
                self._settled()
                following = next((other for other in self._blocked if other.until()), None)
                if following is None and not self._lock.wanted:
                    sleep()
                elif following is not me:
                    self._lock.release(following)
                    self._lock.wait_to_be_told(me)
                    self._stand_in()
                if self._over or self._baton.aborting:
                    raise Aborted
        finally:
            self._blocked.remove(me)

    def _stand_in(self) -> None:
        self._baton.stands(self._rank, threading.get_ident(), threading.get_native_id())

    def _settled(self) -> bool:
        """Wait until no other thread of the rank moves; whether that could be waited for."""

        def others() -> list[int]:
            me = threading.get_native_id()
            threads = [thread.native_id or 0 for thread in (*self._threads, *self._daemons)]
            return [task for task in {*threads, *self.running, self._own[1]} if task != me]

        settled = self._standstill.reached(others)
        if not settled and self._order is not None:
            self._voids.add(NOT_SETTLED)
        return settled

    @contextmanager
    def taken(self, shared: tuple[Hashable, ...] | None = None, *, calls: bool = True) -> Iterator[None]:
        """While open, this thread is the rank. ``shared``: by which its call is in order with those of other threads.

        ``calls``: that may be one that other ranks see. Raises Aborted if the rank has ended."""
        caller = self._caller(shared)
        chosen = self._acquire(caller)
        try:
            if self._over or self._stragglers.over or self._baton.aborting:
                raise Aborted
            if caller is not None and not chosen:
                self._let_others_go_first(caller)
            if calls:
                self._voids.add(VOID)
            self._stand_in()
            yield
        finally:
            self._baton.stands(self._rank, *self._own)
            self._let_go()

    def call(self, shared: tuple[Hashable, ...]) -> None:
        """On the rank's own thread, which is about to make a call: others of its threads may make theirs first."""
        if self._order is not None and self.has_others and (caller := self._caller(shared)) is not None:
            self._let_others_go_first(caller)
            if self._baton.aborting:
                raise Aborted

    def _caller(self, shared: tuple[Hashable, ...] | None) -> Caller | None:
        return None if self._order is None or shared is None else Caller(here.thread, shared, where(sys._getframe(3)))

    def _acquire(self, caller: Caller | None) -> bool:
        """Wait for the turn; whether it was decided that this caller is next."""
        if caller is None or self._order is None:
            return self._lock.acquire()
        self._order.comes(caller)
        try:
            return self._lock.acquire(caller)
        finally:
            self._order.goes(caller)

    def _let_others_go_first(self, caller: Caller) -> None:
        assert self._order is not None
        self._order.let_others_go_first(caller, self._settled)
        self._stand_in()

    @property
    def is_decided(self) -> bool:
        """Whether it is decided which of the rank's threads goes first."""
        return self._order is not None

    def name_of_a_lock(self) -> str:
        """That of the next lock which the rank makes, in every run."""
        return self._numbered("lock", "")

    @property
    def has_others(self) -> bool:
        """Whether something that the rank started may still run."""
        return bool(self._threads or self._daemons or self._tasks)

    def start(self, thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
        """Start a thread that is this rank."""
        name = _name(getattr(thread, "_target", None) or thread.run)
        what = f"a thread ({name}, started at {_caller()})"
        if thread.daemon:
            run, ours = self._as_rank(thread.run, "", self._numbered("thread", name)), self._daemons
        else:
            run, ours = self._as_rank(thread.run, what, self._numbered("thread", name)), self._threads
        self._told[thread] = what
        thread.daemon = True  # it must not keep this process, which is not its rank's alone

        def run_to_its_end() -> None:
            try:
                run()
            except BaseException:
                if not (self._baton.aborting or self._over or self._stragglers.over):  # the run is over, or has failed
                    raise
            finally:
                ours.remove(thread)
                del self._told[thread]
                self._news.set()
                del thread.run

        thread.run = run_to_its_end  # type: ignore[method-assign]
        ours.append(thread)
        if frames_private.is_asked_by_a_program(sys._getframe(1)):
            self._unjoined.add(thread)
            self._several |= len(self._unjoined) > 1
        start(thread)

    def submit(self, submit: Callable[..., Any], task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Give a task to an executor, to be run as this rank."""
        what = f"a task of an executor ({_name(task)}, given at {_caller()})"
        future = submit(self._as_rank(task, what, self._numbered("task", _name(task))), *args, **options)
        self._tasks.append(future)
        future.add_done_callback(self._done)
        return future

    @property
    def side_by_side(self) -> bool:
        """Whether the program had several threads or tasks of the rank run at once."""
        return self._several or self.executors.side_by_side

    def joined(self, thread: threading.Thread) -> None:
        """The program has waited for it."""
        self._unjoined.discard(thread)

    def let_others_go_on(self) -> None:
        """Let the other ranks run as far as they can: this one may sleep until one of them has done something."""
        self._voids.add("a rank slept, as one does that polls")
        self._baton.pause(self._rank)

    def finish(self) -> None:
        """Wait for what the rank started, as its process would before it ends, while that may still do anything."""
        self._stragglers.returned.add(self._rank)
        while self._threads or self._tasks:
            self._stragglers.wait(self._rank, self)
            if self._may_leave and self._stragglers.leave(self._rank):
                break
            if others := self._baton.others_ready(self._rank, self._stragglers.returned):
                self._baton.pass_to(self._rank, others)
            else:
                waiting(self._wait_for_news)

    @property
    def has_begun(self) -> bool:
        """Whether each of them has come as far as to run."""
        return len(self.running) >= max(1, len(self._threads) + sum(task.running() for task in list(self._tasks)))

    def look_again(self, *, may_leave: bool) -> None:
        """Wake the rank's own thread, which waits. ``may_leave``: it may ask to leave its others alone."""
        self._may_leave = may_leave
        self._news.set()

    @property
    def daemons(self) -> list[str]:
        """The daemons of the program's own that still run, in words; those of torch end with the process."""
        return [self._told[thread] for thread in self._daemons if thread in self._unjoined]

    def end(self) -> None:
        """The rank has ended: what still wants to call is unwound."""
        self._over = True
        self._let_go()

    def _done(self, task: concurrent.futures.Future[Any]) -> None:
        self._tasks.remove(task)
        self._news.set()

    def _wait_for_news(self) -> None:
        """Until one of the others has ended, or somebody says that there is something to look at."""
        self._news.wait()
        self._news.clear()

    def _numbered(self, kind: str, name: str) -> str:
        """The name of something that the rank starts, among the like of it, in every run."""
        told = f"{kind} {name.rpartition('.')[2]}".rstrip()
        self._started[told] += 1
        return f"{told} #{self._started[told] - 1}"

    def _as_rank(self, task: Callable[..., Any], what: str, thread: str) -> Callable[..., Any]:
        """``task``, to be called on another thread, which is this rank meanwhile; ``what`` it is if waited for."""
        home, world = here.home, groups_private.world_of_this_thread()

        @functools.wraps(task)
        def run(*args: Any, **options: Any) -> Any:
            if self._over:
                raise Aborted
            before, me = dict(here.__dict__), threading.get_native_id()
            if what:
                self.running[me] = what
            here.__dict__.update(number=self._rank, home=home, turn=None, borrowed=self, thread=thread)
            try:
                with groups_private.in_world(world), torch.autograd.set_multithreading_enabled(False), self._around():
                    return task(*args, **options)
            except BaseException as error:
                self._refused(self._rank, error)
                raise
            finally:
                self.running.pop(me, None)
                here.__dict__.clear()
                here.__dict__.update(before)

        return run


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _caller() -> str:
    return where(sys._getframe(1)) or "an unknown place"


@contextmanager
def turn_kept() -> Iterator[None]:
    """While open, this thread waits without giving up its turn."""
    turn, here.turn = here.turn, None
    try:
        yield
    finally:
        here.turn = turn


def waiting(wait: Callable[..., Any], *args: Any) -> Any:
    """Wait; a rank's own thread with its turn given up, if one of its other threads could take it."""
    turn = here.turn
    if turn is None or not turn.has_others:
        return wait(*args)
    with turn_kept(), turn.given_up():
        return wait(*args)
