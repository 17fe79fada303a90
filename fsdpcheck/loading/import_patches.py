"""What an implementation, or a user's model, changes of the process when it is imported: its own patches.

They are taken out again at once, so that the answer is computed with the torch that was there before, and are in place
on ranks for the length of that implementation's runs. Importing a library that adds modules and names changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from fsdpcheck import process_state
from fsdpcheck.loading import references
from fsdpcheck.process_state import Change, SettingChange
from fsdpcheck.process_state.seeds import fixed_seeds

_FILTERS: Final = "warnings.filters"
_LASTING: Final = frozenset({"sys.path", "sys.meta_path", "sys.path_hooks", _FILTERS, "gc.callbacks"})
"""Settings that imports change for good: nothing a judge computes depends on them."""

_patches: dict[str, tuple[Change, ...]] = {}
"""By what was imported; a file or module that holds several adapters is imported with the first of them."""


@contextmanager
def recorded(ref: str) -> Iterator[None]:
    """While the object that ``ref`` names is imported, made or called: with what its home has changed so far in place.

    What is drawn meanwhile is drawn from fixed seeds. On a rank, where ranks run, nothing is recorded: what is left
    there is noticed when they have ended.
    """
    home, watched = _home(ref), process_state.state()
    if watched.busy:
        yield
        return
    known = _patches.get(home)
    mark = watched.mark()
    for change in known or ():
        change.put_in_place()
    try:
        with fixed_seeds():
            yield
    finally:
        found = _put_back(watched.changes(mark))
    _patches[home] = tuple({**{_name(one): one for one in found}, **{_name(one): one for one in known or ()}}.values())


def _put_back(changes: list[Change]) -> list[Change]:
    """Put back what was changed, but for what lasts, and return it. Of filters of warnings those last that raise none.

    Else a warning in the judge would be an error of fsdpcheck.
    """
    found = [one for one in changes if _name(one) not in _LASTING]
    process_state.put_back(reversed(found))
    for one in changes:
        if isinstance(one, SettingChange) and _name(one) == _FILTERS and one.setting.write is not None:
            one.setting.write([kept for kept in one.now if kept[0] != "error" or kept in one.was])
    return found


def _name(change: Change) -> str:
    return change.setting.name if isinstance(change, SettingChange) else change.path


def patches(refs: Iterable[str]) -> list[Change]:
    """What the imports of all these have changed, in the order they were imported; "" is none."""
    homes = {_home(ref) for ref in refs if ref}
    return [change for home, changes in _patches.items() if home in homes for change in changes]


def told(refs: Iterable[str]) -> tuple[str, ...]:
    """The same in words, a sentence each."""
    homes = {_home(ref) for ref in refs if ref}
    return tuple(
        f"importing {home} left {change.told()}: in place on ranks, and not where they are judged"
        for home, changes in _patches.items()
        if home in homes
        for change in changes
        if not isinstance(change, SettingChange) or change.setting.write is not None
    )


def _home(ref: str) -> str:
    """The file or module of a reference; a built-in adapter's is its name."""
    target, colon, _ = references.canonical(ref).rpartition(":")
    return target if colon else ref
