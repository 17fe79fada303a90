"""Locks that simulated ranks would share, because they share modules: apart where that is possible, told where not.

A lock of a module is one lock a process: real ranks never wait for one another at it. So each rank is given its own
where the name of a module, or of a class in it, is all that holds the lock. What is left (a lock inside an object that
ranks share) and is held across a collective stops all ranks: the one that has the turn waits for one that waits for the
turn. That is seen (simulation/waits.py) and told, and is no finding: on real ranks it does not happen.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, ModuleType
from typing import Any, Final

from fsdpcheck.compat import frames_private
from fsdpcheck.execution import Failure
from fsdpcheck.simulation.current_rank import current_rank
from fsdpcheck.simulation.named_locks import LOCKS, OF_PYTHON, RLOCK, is_taken, named
from fsdpcheck.simulation.run import SimulatedRun, no_progress
from fsdpcheck.simulation.scheduler import place
from fsdpcheck.simulation.waits import nobody_moves

_REFERENCES: Final = 3
"""To a lock beside the places that hold it, while it is looked at: the table's, a local variable's, an argument's."""
_apart: list[LockApart] = []
_seen: set[str] = set()


class LockApart:
    """A lock of which each rank has its own. A thread that is no rank takes all of them, so it excludes every rank."""

    def __init__(self, kind: type) -> None:
        self._make = threading.RLock if kind is RLOCK else threading.Lock
        self._own: list[Any] = [self._make()]
        self._outside: list[list[Any]] = []

    def widen(self, world_size: int) -> None:
        """Have one for each of so many ranks."""
        self._own += [self._make() for _ in range(world_size - len(self._own))]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: list[Any] = []
        for lock in self._mine():
            if not lock.acquire(blocking, timeout):
                for other in taken:
                    other.release()
                return False
            taken.append(lock)
        if current_rank() is None:
            self._outside.append(taken)
        return True

    def release(self) -> None:
        rank = current_rank()
        for lock in self._outside.pop() if rank is None and self._outside else self._mine()[:1]:
            lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine()[0], name)

    def _mine(self) -> list[Any]:
        rank = current_rank()
        return list(self._own) if rank is None else [self._own[rank]]


def set_apart(reference: str, world_size: int) -> None:
    """Give each rank its own of the locks that the modules of an implementation hold by name. It is loaded already."""
    if reference not in _seen:
        _seen.add(reference)
        _replace(modules_of(reference))
    for lock in _apart:
        lock.widen(world_size)


def stuck_in_a_lock(run: SimulatedRun) -> Failure | None:
    """What is said when the rank whose turn it is waits in the operating system, and no thread is left to wake it.

    Threads of ranks that have ended wait for the next run, so nobody moves after the last one has either. That is asked
    when it is proved that none moves: before it, the last may still be about to end.
    """
    if not nobody_moves() or run.baton.all_ended:
        return None
    rank = run.baton.holder
    frame = run.baton.frame(rank)
    where, _ = place(frame)
    failure = no_progress(run, f"rank {rank} waits for another thread at {where}, and no thread is left that can move")
    holder = _holder(run, rank, frame)
    if failure.kind != "no progress" or holder is None:
        return failure
    there, _ = place(run.baton.frame(holder))
    text = (
        f"simulated ranks share a lock: rank {rank} waits for one that rank {holder} holds\n"
        f"  got     rank {rank} at {where}; rank {holder}, which holds it, at {there}\n"
        f"  wanted  a lock that each rank has for itself, as real ranks have\n"
        f"  next    name the global that holds it in Features.rank_local, or run with --engine processes"
    )
    return replace(failure, kind="shared lock", text=text)


def _replace(modules: list[ModuleType]) -> None:
    """Put locks apart in place of those that nothing but names in ``modules`` holds and nobody has taken."""
    places: dict[int, tuple[Any, list[tuple[Any, str]]]] = {}
    for module in modules:
        for owner, name, lock in _slots(module):
            places.setdefault(id(lock), (lock, []))[1].append((owner, name))
    for lock, held in places.values():
        if sys.getrefcount(lock) == len(held) + _REFERENCES and not is_taken(lock):
            _apart.append(LockApart(type(lock)))
            for owner, name in held:
                setattr(owner, name, _apart[-1])


def _slots(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, lock) of each lock that a name of a module or of its classes is bound to."""
    for name, value in list(vars(module).items()):
        if isinstance(value, OF_PYTHON):
            yield module, name, value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, entry in list(vars(value).items()):
                if isinstance(entry, OF_PYTHON):
                    yield value, inner, entry
                elif isinstance(entry, functools.cached_property) and hasattr(entry, "lock"):  # until Python 3.12
                    yield entry, "lock", entry.lock


def modules_of(reference: str) -> list[ModuleType]:
    """The modules of an implementation that is loaded: the one that ``reference`` names, and what it uses."""
    target = reference.rpartition(":")[0]
    homes = [module for name, module in sys.modules.copy().items() if target in (name, _file(module))]
    return list({module.__name__: module for home in homes for module in _modules(home)}.values())


def _file(module: ModuleType) -> Any:
    return getattr(module, "__dict__", {}).get("__file__")


def _modules(home: ModuleType) -> list[ModuleType]:
    """``home`` and what it uses, directly or not, of its own package or outside site-packages."""
    found: dict[str, ModuleType] = {}
    pending = [home]
    while pending:
        module = pending.pop()
        if module.__name__ in found or (module is not home and not _is_the_users(module, home)):
            continue
        found[module.__name__] = module
        for value in list(vars(module).values()):
            used = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
            if isinstance(used, ModuleType):
                pending.append(used)
    return list(found.values())


def _is_the_users(module: ModuleType, home: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or "<"
    if module.__name__.partition(".")[0] == home.__name__.partition(".")[0]:
        return True
    return not (frames_private.is_plumbing(file) or "-packages" in file or module.__name__.startswith("fsdpcheck."))


def _holder(run: SimulatedRun, rank: int, frame: FrameType | None) -> int | None:
    """The rank that holds a lock which the code that ``rank`` is in names, if one does."""
    wanted = [lock for lock in named(frame) if isinstance(lock, LOCKS) and is_taken(lock)]
    for lock in wanted:
        _, told, owner = repr(lock).partition("owner=")
        if told:
            return run.baton.rank_of(int(owner.split()[0]))
    for other in set(range(run.world.size)) - {rank} - set(run.ended):
        there = run.baton.frame(other)
        while there is not None:
            if any(lock is mine for lock in named(there) for mine in wanted):
                return other
            there = there.f_back
    return None
