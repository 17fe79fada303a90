"""Sources: which files mutants change, and what their modules are called where the implementation runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from fsdpcheck import adapters
from fsdpcheck.loading import provenance


class Sources:
    """Of these adapters: file -> the dotted name of its module or, of a user's own, its path; "" for what stays.

    Of a user's own the files in the folder or package of the adapter are changed, but for an environment of installed
    packages that lies there; of others the reference's and torch's
    own FSDP, whichever ran, and not the few lines that make an adapter of them. ``pattern``: of paths.
    """

    def __init__(self, references: Sequence[str], pattern: str = "*") -> None:
        own = [folder for ref in references if not adapters.is_builtin(ref) for folder in _folders(ref)]
        built_in = len(own) < len(references)
        self._pattern, self._own = pattern, tuple(f"{folder}/" for folder in own)
        self._others = tuple(folder for folder in provenance.sites() if not any(one.startswith(folder) for one in own))
        self._packages = (
            {folder: name for name in ("fsdpcheck.impl", "torch") for folder in _package(name)} if built_in else {}
        )

    def __call__(self, file: str) -> str:
        if not fnmatchcase(file, self._pattern):
            return ""
        if file.startswith(self._own) and not file.startswith(self._others):
            return file
        for folder, package in self._packages.items():
            if file.startswith(f"{folder}/"):
                parts = Path(file).relative_to(folder).with_suffix("").parts
                return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        return ""


def _folders(reference: str) -> Iterator[str]:
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):
        yield str(Path(place).expanduser().resolve().parent)
    else:
        yield from _package(place.partition(".")[0])


def _package(name: str) -> Iterator[str]:
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations:
        yield from map(str, found.submodule_search_locations)
    elif found is not None and found.origin:
        yield str(Path(found.origin).parent)
