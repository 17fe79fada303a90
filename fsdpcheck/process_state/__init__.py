"""What a process is set to, and what was left changed of it: noticed after each run, put back, and told.

Simulated ranks share a process, and so do their runs. Settings of torch and Python (settings.py), containers of hooks
(containers.py) and what names of modules and classes stand for (names.py) are compared before and after a run of ranks;
what an implementation changes when it is imported (loading/import_patches.py) is in place on its ranks alone. What code
of one process cannot be kept from is stated in docs/threat-model.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from fsdpcheck.process_state import containers, settings
from fsdpcheck.process_state.names import Name, Names, is_wrapped
from fsdpcheck.process_state.settings import Setting

Ranks = frozenset[int]


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that has another value than before."""

    setting: Setting
    was: Any
    now: Any

    def told(self) -> str:
        return self.setting.told(self.was, self.now)

    def put_back(self) -> None:
        if self.setting.write is not None:
            self.setting.write(self.was)

    def put_in_place(self) -> None:
        if self.setting.write is not None:
            self.setting.write(self.now)


Change = SettingChange | Name
Mark = list[Any]


class ProcessState:
    """All that is watched in this process."""

    def __init__(self) -> None:
        self.busy = False
        """Whether ranks are running."""
        self.undisturbed = False
        """Whether nobody but ranks changes what is watched, from run to run."""
        self.settings = (*settings.table(), *containers.table(), *settings.of_signals())
        self._signals: Mark = []
        """What was last read of signals, the last of the settings: dear to read, and no judge changes them."""
        self.on_ranks = tuple(one for one in self.settings if one.scope != "process")
        self.names = Names()
        self._readers = [one.read for one in self.settings]
        self._rank_readers = [one.read for one in self.on_ranks]

    def mark(self) -> Mark:
        """What everything is now, for ``changes``."""
        if not self.undisturbed:
            self.names.save()
            return [read() for read in self._readers]
        self.names.look_for_more()  # and no more: while cases are drawn, names of Hypothesis are the harness's
        known = self._signals
        return [read() for read in self._readers[: -len(known) or None]] + known

    def changes(self, mark: Mark) -> list[Change]:
        """What is another than at ``mark``, which must be the last that was made."""
        now = [read() for read in self._readers]
        found = _different(self.settings, mark, now)
        self._signals = [] if found else now[-len(settings.of_signals()) :]
        return [*found, *self.names.changes(often=self.undisturbed)]

    def on_rank(self) -> list[Any]:
        """What the settings are that a rank may have apart; called on its thread, in its turn."""
        return [read() for read in self._rank_readers]

    def left_on_rank(self, before: list[Any]) -> list[SettingChange]:
        return _different(self.on_ranks, before, self.on_rank())


@functools.cache
def state() -> ProcessState:
    """The one of this process, made at the first call."""
    return ProcessState()


@contextmanager
def undisturbed(is_so: bool = True) -> Iterator[None]:
    """Only ranks change what is watched, if ``is_so``: what nobody else computes with is compared by ``settled``."""
    watched, before = state(), state().undisturbed
    watched.names.save()
    watched.undisturbed = is_so
    try:
        yield
    finally:
        watched.undisturbed = before
        watched.names.save()


def settled() -> dict[str, Ranks]:
    """Put back what runs have left changed and did not compare, for ``sentences``; nothing where runs compare all."""
    watched = state()
    found = watched.names.changes() if watched.undisturbed else []
    put_back(reversed(found))
    return dict.fromkeys((change.told() for change in found), frozenset())


def put_back(changes: Iterable[Change]) -> list[Change]:
    """Put back what was changed; returns what could not be: a mode that is open, a name that nobody may set."""
    stuck = []
    for change in changes:
        with suppress(Exception):
            change.put_back()
        if isinstance(change, SettingChange) and _differ(change.setting.read(), change.was):
            stuck.append(change)
    return [change for change in stuck if _differ(change.setting.read(), change.was)]


class Kept:
    """A run of ranks, during which nothing of this process is changed for anybody else: ``with Kept(...) as kept``.

    ``own``: what the implementation's import changes, in place for the length of the run. Ranks run inside
    ``kept.on_rank(rank)``, each on its own thread or all on this one. Afterwards ``left`` says in words what was left
    changed and by which ranks (empty: it is not known), and ``spent`` whether threads or process cannot be used again.
    """

    def __init__(self, own: Iterable[Change], world_size: int = 1) -> None:
        self._own, self._size = tuple(own), world_size
        self._on_ranks: dict[int, list[SettingChange]] = {}
        self._state = state()
        self.left: dict[str, Ranks] = {}
        self.spent = False

    def __enter__(self) -> Kept:
        self._mark, self._state.busy = self._state.mark(), True
        for change in self._own:
            change.put_in_place()
        return self

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Runs the rank's program, in its turn, and looks at what is then set on its thread."""
        with self._own_on_this_thread():
            before = self._state.on_rank()
            try:
                yield
            finally:
                self._on_ranks[rank] = self._state.left_on_rank(before)

    def __exit__(self, *_: object) -> None:
        found, self._state.busy = self._state.changes(self._mark), False
        foreign = [change for change in found if not self._is_own(change)]
        stuck = put_back(reversed([*found, *self._own]))
        everywhere = frozenset([0]) if self._size == 1 else frozenset()
        self.left = {change.told(): self._among(change) or everywhere for change in foreign if _telling(change, found)}
        shared = {change.setting for change in found if isinstance(change, SettingChange)}
        for rank, those in sorted(self._on_ranks.items()):
            for one in those:
                if one.setting not in shared and _telling(one, those):
                    self.left[one.told()] = self.left.get(one.told(), frozenset()) | {rank}
                if one.setting not in shared and one.setting.scope == "thread":
                    self.spent = True
                    put_back([replace(one, was=one.setting.read())])  # threads to come may begin with what it set
        self.spent |= bool(stuck)

    @contextmanager
    def _own_on_this_thread(self) -> Iterator[None]:
        """What the import changes of settings that each thread has, on a rank's thread too."""
        own = [change for change in self._own if isinstance(change, SettingChange) and change.setting.scope == "thread"]
        here = [change for change in own if _differ(change.setting.read(), change.now)]
        was = [change.setting.read() for change in here]
        for change in here:
            change.put_in_place()
        try:
            yield
        finally:
            for change, value in zip(here, was, strict=True):
                if change.setting.write is not None:
                    change.setting.write(value)

    def _is_own(self, change: Change) -> bool:
        """Whether something is as the import left it."""
        if isinstance(change, SettingChange):
            return any(
                isinstance(own, SettingChange) and own.setting is change.setting and not _differ(own.now, change.now)
                for own in self._own
            )
        alike = (own for own in self._own if isinstance(own, Name) and own.path == change.path)
        return any(own.now is change.now or is_wrapped(own.now, change.now) for own in alike)

    def _among(self, change: Change) -> Ranks:
        """The rank that left it, if only one was seen to have it then."""
        if not isinstance(change, SettingChange) or change.setting.scope == "process":
            return frozenset()
        having = [rank for rank, those in self._on_ranks.items() if any(one.setting is change.setting for one in those)]
        return frozenset(having) if len(having) == 1 else frozenset()


def sentences(left: Mapping[str, Ranks], world_size: int = 0) -> tuple[str, ...]:
    """What was left, a sentence each: "rank 1 left torch.is_anomaly_enabled() on"."""
    return tuple(f"{_who(ranks, world_size)} left {what}" for what, ranks in left.items())


def of_each(left: Mapping[int, Iterable[str]]) -> dict[str, Ranks]:
    """The ranks that left it, for all that each rank left of a process of its own."""
    found: dict[str, Ranks] = {}
    for rank, those in sorted(left.items()):
        found.update({what: found.get(what, frozenset()) | {rank} for what in those})
    return found


def _who(ranks: Ranks, world_size: int) -> str:
    if not ranks:
        return "a rank"
    if len(ranks) == world_size > 1:
        return "every rank"
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _telling(change: Change, among: Sequence[Change]) -> bool:
    """Whether a change says something beside the others: a default device is a mode, which ends with it."""
    if isinstance(change, Name) or change.setting.name != "torch function modes":
        return True
    return not any(isinstance(one, SettingChange) and one.setting.name == "torch.set_default_device" for one in among)


def _different(table: tuple[Setting, ...], before: list[Any], now: list[Any]) -> list[SettingChange]:
    if before == now:
        return []
    return [SettingChange(one, a, b) for one, a, b in zip(table, before, now, strict=True) if _differ(a, b)]


def _differ(one: Any, other: Any) -> bool:
    return one is not other and bool(one != other)
