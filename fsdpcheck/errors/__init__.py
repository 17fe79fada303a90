"""Every error the project raises. A message says what was got, what was wanted, where, and what to do next."""

from __future__ import annotations

from typing import ClassVar

HOLDS, FINDING, USAGE, INTERNAL, NO_PROGRESS = 0, 1, 2, 3, 4
"""The exit codes of every command: holds, a finding, a usage or adapter error, an internal error, no progress."""


class FsdpcheckError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what a command that dies of it returns."""

    exit_code: ClassVar[int] = INTERNAL


class UsageError(FsdpcheckError):
    """The caller asked for something that cannot be: an option, a name, a file."""

    exit_code: ClassVar[int] = USAGE


class InvalidCase(UsageError):
    """A case contradicts itself (world size against mesh, tied layers of unequal shape, ...)."""


class InvalidToken(UsageError):
    """A replay token is cut short, of another version, or not one of ours. Nothing of it was run."""


class AdapterError(UsageError):
    """An adapter cannot be found or imported, or does not do what the adapter protocol asks."""


class MissingDependency(AdapterError):
    """An adapter needs a package that is not installed."""


class NoSuchLaw(UsageError):
    """No law matches ``glob``, which a session was to choose by."""

    def __init__(self, text: str, glob: str) -> None:
        super().__init__(text)
        self.glob = glob


class NotSupported(UsageError):
    """A program asked simulated ranks for something they do not offer."""


class NotPlain(UsageError):
    """A message to another process holds something that is no plain data."""


class OtherWorldSize(UsageError):
    """A case has more ranks than ``there`` are. A law that needs such cases is not asked there."""

    def __init__(self, text: str, there: int) -> None:
        super().__init__(text)
        self.there = there


class Refused(UsageError):
    """An implementation says, on every rank alike, that it cannot take a user's own model. The law is not supported."""


class NotExact(FsdpcheckError):
    """A case leaves the exact domain: the bit budget does not prove its sums. It is rejected and counted."""


class NotApplicable(NotExact):
    """A case of which a law says nothing on this implementation: it accepts no sibling of it, or shows no padding.

    Rejected and counted as others, but for what the implementation accepts or shows, not for its numbers.
    """


class NotOnRanks(NotApplicable):
    """A case of which a law says nothing on this implementation because of how many ranks it has."""


class NotReadable(FsdpcheckError):
    """What fills an ordinary model from a checkpoint raised, which is for a law to judge; what it said, and where."""


class NoProgress(FsdpcheckError):
    """A budget that the user set ran out while some rank could still run. Never called a deadlock."""

    exit_code: ClassVar[int] = NO_PROGRESS


class Interrupted(FsdpcheckError):
    """What a probe raises in the middle of a step, on every rank, to see what becomes of the training."""


def explain(what: str, *, got: object = "", wanted: object = "", where: object = "", then: object = "") -> str:
    """The words of an error, a line each: what is wrong, what was got and wanted, where, and what to do next.

    A part that is "" has no line.
    """
    parts = {"got": got, "wanted": wanted, "where": where, "next": then}
    return "\n".join([what, *(f"  {name:<8}{said}" for name, said in parts.items() if said != "")])


def qualified(kind: type) -> str:
    """The whole name of a class: what it is known by where it cannot be told by itself, across processes."""
    return f"{kind.__module__}.{kind.__qualname__}"


def __getattr__(name: str) -> object:
    """Report where a name that has moved is now."""
    if name == "Violation":
        raise ImportError("cannot import name 'Violation' from 'fsdpcheck.errors': it is in fsdpcheck.laws now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
