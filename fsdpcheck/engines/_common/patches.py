"""Installs: context managers by dotted name, in place in one process for the length of a run, counting their hits.

An install is "pkg.mod:attr" or "file.py:attr"; calling it gives a context manager. Its value, or the install itself,
may have an int attribute ``hits`` that says how often the patched code ran; one without it counts as run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.loading import references

_KIND: Final = references.Kind("install")


class Hits:
    """Reads the hit counters of what is installed."""

    def __init__(self, counters: dict[str, Any]) -> None:
        self._counters = counters

    def read(self) -> dict[str, int]:
        return {name: int(getattr(counter, "hits", 1)) for name, counter in self._counters.items()}


@contextmanager
def installed(names: Sequence[str]) -> Iterator[Hits]:
    """Put every install in place, in order, and take them out in reverse. Raises UsageError for a name that is none."""
    with ExitStack() as stack:
        counters = {}
        for name in names:
            factory = _resolve(name)
            value = stack.enter_context(factory())
            counters[name] = value if hasattr(value, "hits") else factory
        yield Hits(counters)


def check(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no install, without putting anything in place."""
    for name in names:
        _resolve(name)


def described(module: str) -> list[tuple[str, str, str]]:
    """(name, what it does, pattern of laws that it is said to break) of each install in "pkg.mod" or "file.py".

    An install is a function of the module's own, without parameters, that gives a context manager; what begins with an
    underscore is none. Its attribute ``plants`` or its docstring says what goes wrong, ``caught_by`` which laws break.
    Raises UsageError where the module cannot be imported, holds no install, or one without words.
    """
    own, found = references.module(module, _KIND), []
    for name, value in vars(own).items():
        if name.startswith("_") or not _is_install(value, own.__name__):
            continue
        says = " ".join(str(getattr(value, "plants", "") or inspect.getdoc(value) or "").split())
        if not says:
            then = "say in its docstring what goes wrong"
            raise UsageError(explain(f"{name} of {module} does not say what it plants", then=then))
        found.append((name, says, str(getattr(value, "caught_by", ""))))
    if not found:
        wanted = "functions without parameters that give a context manager"
        raise UsageError(explain("there is nothing to install", got=f"no fault in {module}", wanted=wanted))
    return found


def _is_install(value: Any, module: str) -> bool:
    if inspect.isclass(value) or not callable(value):
        return False
    if hasattr(value, "hits") and hasattr(value, "plants"):  # an object that is described, wherever its class stands
        return True
    if getattr(value, "__module__", None) != module:
        return False
    needed = [one for one in inspect.signature(value).parameters.values() if one.default is one.empty]
    return all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed)


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(":") if ".py:" in name else name.partition(":")
    try:
        if module.endswith(".py"):
            return getattr(references.module(module, _KIND), attribute)
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"there is no install {name!r}\n  got     {error}\n"
            f"  wanted  'pkg.mod:attr' or 'file.py:attr' of a context manager factory\n"
            f"  next    `fsdpcheck list faults` shows the planted faults"
        ) from error
