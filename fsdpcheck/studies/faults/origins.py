"""Planted: what is put to laws, from three sources: faults of the reference, a user's own, mutants of a source."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fsdpcheck.engines._common import hosts
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.findings import faults
from fsdpcheck.loading import references
from fsdpcheck.studies.faults.mutants import Mutant


@dataclass(frozen=True)
class Planted:
    """``installs`` are in place together, under one of ``adapters``; laws that match ``expected`` are asked first.

    ``says``: what is wrong then. ``where``: "file:line" of what is altered, "" where that is not known. ``lines``:
    (file, line) of which a law must run one to be asked; () for each law.
    """

    name: str
    installs: tuple[str, ...]
    adapters: tuple[str, ...]
    says: str
    expected: str = ""
    where: str = ""
    lines: tuple[tuple[str, int], ...] = ()


def of_the_reference(pattern: str, adapters: Sequence[str] = ()) -> list[Planted]:
    """Faults of fsdpcheck.impl whose names match, each under the adapter that it is planted in.

    With ``adapters``: those planted in one of them, and those in torch's own functions, under these.
    """
    found = []
    for name, fault in faults.faults().items():
        if fnmatchcase(name, pattern):
            subjects: tuple[str, ...] = (fault.subject,)
            if adapters:
                of_torch = fault.target.startswith("torch")
                subjects = tuple(one for one in adapters if of_torch or one.partition(":")[0] == fault.subject)
            if subjects:
                found.append(Planted(name, (faults.resolved(name),), subjects, fault.plants, fault.caught_by))
    return found


def of_module(name: str, pattern: str, adapters: Sequence[str]) -> list[Planted]:
    """A user's own: what "pkg.mod" or "file.py" holds to install (engines/_common/patches.py), under each adapter.

    It is imported where the implementation is, and not here. Raises UsageError where that fails, or nothing matches.
    """
    try:
        described = hosts.installs(adapters[0], name)
    except UsageError as error:
        wanted = "a module, or a file, that imports, with functions that give a context manager"
        what, then = f"--from {name}: no fault can be had of it", "mend that, or name another with --from"
        raise UsageError(explain(what, got=error, wanted=wanted, then=then)) from error
    found = [
        Planted(attribute, (references.canonical(f"{name}:{attribute}"),), tuple(adapters), says, expected)
        for attribute, says, expected in described
        if fnmatchcase(attribute, pattern)
    ]
    if not found:
        what, known = f"--from {name}: no fault matches {pattern!r}", ", ".join(one for one, _, _ in described)
        raise UsageError(explain(what, wanted=f"one of {known}"))
    return found


def of_mutants(mutants: Sequence[Mutant], adapters: Sequence[str]) -> list[Planted]:
    """Mutants, asked of the laws that run their lines."""
    return [
        Planted(
            one.name, (one.install,), tuple(adapters), one.says, where=f"{one.file}:{one.site.line}",
            lines=((one.file, one.site.line),),
        )
        for one in mutants
    ]  # fmt: skip


def pairs(planted: Sequence[Planted], count: int, seed: int) -> list[Planted]:
    """``count`` pairs of them, drawn; of each the adapters that both are planted in. One may hide the other."""
    both = [
        (one, other) for one, other in itertools.combinations(planted, 2) if set(one.adapters) & set(other.adapters)
    ]
    return [
        Planted(
            f"{one.name} + {other.name}",
            one.installs + other.installs,
            tuple(name for name in one.adapters if name in other.adapters),
            f"{one.says} {other.says}",
            where=" and ".join(filter(None, (one.where, other.where))),
            lines=one.lines + other.lines,
        )
        for one, other in random.Random(seed).sample(both, min(count, len(both)))
    ]
