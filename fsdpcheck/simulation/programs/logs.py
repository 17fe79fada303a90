"""Handlers and levels of loggers apart by rank: loggers are found by name, so ranks share them, and processes do not.

A logger is noted when a rank first adds or removes a handler of it or sets its level; from then on each rank has its
own handlers and level of that logger, which begin with what it had before. What is set by assignment is not noted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from fsdpcheck.compat.torch_private import replaced
from fsdpcheck.simulation.current_rank import current_rank
from fsdpcheck.simulation.globals import Swap

_State = dict[logging.Logger, tuple[list[logging.Handler], int]]
_CHANGES: Final = ("addHandler", "removeHandler", "setLevel")
_NOTHING: Final[_State] = {}


class RankLoggers:
    """The loggers that ranks have changed, and what each of them was before."""

    def __init__(self) -> None:
        self._before: _State = {}

    @property
    def swap(self) -> Swap:
        """What ranks have apart."""
        return Swap("loggers", self._read, self._write, cheap=False, fresh=lambda rank: _NOTHING)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, a logger that a rank is about to change is noted."""
        with ExitStack() as stack:
            for name in _CHANGES:
                stack.enter_context(replaced(logging.Logger, **{name: self._noting(getattr(logging.Logger, name))}))
            try:
                yield
            finally:
                self._end()

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(logger: logging.Logger, *args: Any, **options: Any) -> Any:
            if current_rank() is not None and logger not in self._before:
                self._before[logger] = logger.handlers, logger.level
                logger.handlers = list(logger.handlers)
            return real(logger, *args, **options)

        return ours

    def _read(self) -> _State:
        if not self._before:
            return _NOTHING
        return {logger: (logger.handlers, logger.level) for logger in self._before}

    def _write(self, state: _State) -> None:
        """Of a logger that is not in it, the rank has what was there before any changed it."""
        changed = False
        for logger, (handlers, level) in self._before.items():
            logger.handlers, wanted = state.get(logger) or (list(handlers), level)
            changed |= logger.level != wanted
            logger.level = wanted
        if changed:
            logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # of which levels are enabled

    def _end(self) -> None:
        """Put back what was there before, the very lists."""
        for logger, (handlers, level) in self._before.items():
            logger.handlers, logger.level = handlers, level
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]
