"""Violation: a law broke. What was got, what was wanted, where, and the probable cause."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

from fsdpcheck.errors import FINDING, FsdpcheckError, explain
from fsdpcheck.findings.cause import Causes, named

Diagnose = Callable[[], Causes | None]


class Violation(FsdpcheckError, AssertionError):
    """A law broke.

    ``got`` and ``wanted`` are values as text, ``where`` names step, rank, parameter, sample or element. ``cause``: the
    probable cause in words, or a function that looks for causes, which is called when somebody asks and once at most.
    ``despite``: the run failed as it should have, and what broke are the values that it left.
    The law's name and the replay token are added at the edge.
    """

    exit_code: ClassVar[int] = FINDING

    def __init__(
        self, what: str, *, got: str, wanted: str, where: str, cause: str | Diagnose = "", despite: bool = False
    ) -> None:
        super().__init__(what, got, wanted, where)
        self.what, self.got, self.wanted, self.where = what, got, wanted, where
        self.despite, self._cause = despite, cause

    @cached_property
    def causes(self) -> Causes | None:
        """The known mistakes that fit; None when nothing looked for any, or the case cannot tell."""
        return None if isinstance(self._cause, str) else self._cause()

    @property
    def diagnose(self) -> Diagnose | None:
        """What looks for the causes; None where they are said already, or nothing does."""
        return None if isinstance(self._cause, str) else lambda: self.causes

    @property
    def cause(self) -> str:
        """A probable cause in words, or empty when nothing names one."""
        return self._cause if isinstance(self._cause, str) else named(self.causes)

    def __str__(self) -> str:
        told = explain(self.what, got=self.got, wanted=self.wanted, where=self.where)
        return f"{told}\n  cause   probably: {self.cause}" if self.cause else told

    def __reduce__(self) -> tuple[object, ...]:
        return _violation, (self.what, self.got, self.wanted, self.where, self.cause, self.despite)


def _violation(what: str, got: str, wanted: str, where: str, cause: str, despite: bool) -> Violation:
    return Violation(what, got=got, wanted=wanted, where=where, cause=cause, despite=despite)
