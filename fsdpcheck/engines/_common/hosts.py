"""Hosts: one process for each implementation, in which alone its code is imported; started when it is first needed."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Stored
from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import TrainingCase
from fsdpcheck.engines._simulated import questions
from fsdpcheck.engines._simulated.questions import Cover, Declare, Require
from fsdpcheck.errors import AdapterError
from fsdpcheck.processes import fork_server
from fsdpcheck.processes.remote import Died, Remote

_SERVICE: Final = "fsdpcheck.engines._simulated.service"
_MOST: Final = 3
"""Processes kept; the one that was asked for least recently is ended. Each has a torch of its own."""

_hosts: dict[str, Remote] = {}
_declared: dict[str, Declaration] = {}
_required: set[tuple[str, tuple[str, ...]]] = set()
_covering: tuple[str, str] | None = None
"""The folder of what is measured, and the law for which it counts."""


def of(reference: str) -> Remote:
    """The process of the implementation that ``reference`` names."""
    key = adapters.canonical(reference)
    host = _hosts.pop(key, None)
    if host is None or not host.is_open:
        host = Remote(_SERVICE, adapters.modules_of(reference) if _covering is None else ())
        _cover(host, key)
    _hosts[key] = host
    while len(_hosts) > _MOST:
        oldest = next(iter(_hosts))
        _cover(_hosts[oldest], oldest)
        _hosts.pop(oldest).close()
    return host


def prepare(reference: str) -> None:
    """Have what the processes are forked from started, which imports torch meanwhile, for ``reference`` to come first.

    Raises nothing for a reference that names nothing: whoever asks for its process is answered so.
    """
    fork_server.context(adapters.modules_of(reference))


def cover(folder: str, law: str) -> None:
    """Measure from now on which lines and branches of implementations run, for ``law``, "" for none.

    What ran before is kept in ``folder``. To be called before a process is there that imports an implementation.
    Raises MissingDependency.
    """
    global _covering
    _covering = folder, law
    for reference, host in _hosts.items():
        _cover(host, reference)


def uncover() -> None:
    """Measure no longer: the processes that did are ended."""
    global _covering
    _covering = None
    close()


def _cover(host: Remote, reference: str) -> None:
    if _covering is not None and host.is_open:
        with suppress(Died):  # what it had measured since the last law is lost, and its death is the verdict
            host.ask(Cover(_covering[0], reference, _covering[1]))


def running() -> Iterator[Remote]:
    """The processes that are there."""
    yield from [host for host in _hosts.values() if host.is_open]


def declared(reference: str) -> Declaration:
    """What an implementation declares: read once, for what is promised does not change while it is judged.

    Raises what ``adapters.load`` raises.
    """
    key = adapters.canonical(reference)
    if key not in _declared:
        _declared[key] = _asked(reference, Declare(reference), "imported it")
    return _declared[key]


def at_most(declared: Declaration, ranks: int | None) -> Declaration:
    """The same, of an implementation that takes so many ranks at most; None for as many as it says."""
    if ranks is None:
        return declared
    taken = min(ranks, declared.features.max_world_size or ranks)
    return replace(declared, features=replace(declared.features, max_world_size=taken))


def _asked(reference: str, question: object, what: str) -> Any:
    """What the process of an implementation answers; that it ends meanwhile is the implementation's fault."""
    try:
        return of(reference).ask(question)
    except Died as death:
        raise AdapterError(f"adapter {reference!r} ended the process that {what}: {death}") from None


class Hosted:
    """What every engine answers of an implementation by asking the one process that imports it."""

    def declared(self, reference: str) -> Declaration:
        """See engines/base.py."""
        return declared(reference)

    def stored(self, reference: str, folder: str) -> list[Stored]:
        """See engines/base.py."""
        found: list[Stored] = _asked(reference, questions.Stored(reference, folder), "read a checkpoint")
        return found

    def read(self, reference: str, folder: str, case: TrainingCase) -> dict[str, Tensor]:
        """See engines/base.py."""
        found: dict[str, Tensor] = _asked(reference, questions.Read(reference, folder, case), "read a checkpoint")
        return found


def require(reference: str, installs: tuple[str, ...]) -> None:
    """Raise UsageError for a name among ``installs`` that is none where the implementation runs."""
    if installs and (reference, installs) not in _required:
        of(reference).ask(Require(reference, installs))
        _required.add((reference, installs))


def installs(reference: str, module: str) -> list[tuple[str, str, str]]:
    """(name, what it does in words, pattern of laws that it is said to break) of all that ``module`` holds to install.

    Raises UsageError where it cannot be imported, or holds none, or one without words.
    """
    found: list[tuple[str, str, str]] = _asked(reference, questions.Installs(reference, module), f"imported {module}")
    return found


@atexit.register
def close() -> None:
    """End them all."""
    while _hosts:
        _hosts.popitem()[1].close()
