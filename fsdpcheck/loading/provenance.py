"""Provenance: the files and packages that a verdict was found out with, as hashes and versions. Imports no torch.

A verdict depends on the code that the process which judged it had loaded by then. Of fsdpcheck itself that is one hash
over all its sources; of installed packages their builds, in which a file that was edited after its installation
shows; of every other module, the adapter's file and what it imports among them, the content of its file. Data that a
module reads, and what its environment holds, is not seen.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from fsdpcheck.loading import references

GONE: Final = "gone"
"""Stands for the content of a file, or the version of a package, that is no longer there."""

_UNKNOWN: Final = "written while the process ran"
"""Stands for the content of a file that may have been written after its import; it is like no other's."""

_CODE: Final = (".py", ".so", ".pyd", ".dll", ".dylib")
_SHOWN: Final = 12  # of the digits of a build, beside its version

_DIGITS: Final = 32  # of a hash in hexadecimal: 128 bits, of which no two files of a project share


@dataclass(frozen=True)
class Sources:
    """``own``: hash of fsdpcheck's sources. ``files``: path -> hash of its content. ``packages``: name -> its build."""

    own: str
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash of all of it: equal keys, equal sources."""
        return digest(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """As JSON data; ``Sources(**data)`` is its inverse."""
        return {"own": self.own, "files": dict(self.files), "packages": dict(self.packages)}

    def changed(self, now: Sources) -> str:
        """What a process that loads ``now`` has otherwise, by name; "" where it has all the same.

        Of files and packages that it has not loaded yet, what lies on disk counts.
        """
        if self.own != now.own:
            return "fsdpcheck itself changed"
        files = {path: now.files.get(path) or content(path) for path in self.files}
        told = [_became(Path(path).name, then, files[path]) for path, then in self.files.items()]
        told += [f"{Path(path).name} is new" for path in now.files if path not in self.files]
        builds = {name: now.packages.get(name) or build(name) for name in self.packages}
        told += [_became(name, then, builds[name], shown=True) for name, then in self.packages.items()]
        return ", ".join(dict.fromkeys(filter(None, told)))


class Loaded:
    """What this process has loaded so far. To be made before the first of it is imported.

    ``refs``: references (see loading/references.py) to what is under test; files of their packages count by content
    wherever they lie.
    """

    def __init__(self, refs: Iterable[str] = ()) -> None:
        self._roots: set[str] = set()
        self.roots(refs)
        self._begun = time.time_ns()
        self._files: dict[str, str] = {}
        self._packages: dict[str, str] = {}
        self._seen: set[str] = set()
        self._looked_at = 0

    def roots(self, refs: Iterable[str]) -> None:
        """More references to what is under test."""
        self._roots |= {ref.partition(":")[0].partition(".")[0] for ref in refs}

    def sources(self) -> Sources:
        """Of everything that is loaded now, or was before."""
        here = installed()  # ranks on other machines have told of theirs
        builds = {name: build(name) if here.get(name) == told else told for name, told in self.packages().items()}
        return Sources(own(), self.files(), builds)

    def files(self) -> dict[str, str]:
        """Path -> hash of its content, of what is loaded now, or was before."""
        if len(sys.modules) != self._looked_at:
            for top, path in _modules():
                if path not in self._seen:
                    self._seen.add(path)
                    self._note(top, path)
            self._looked_at = len(sys.modules)
        return dict(sorted(self._files.items()))

    def packages(self) -> dict[str, str]:
        """Name -> version, of the same."""
        self.files()
        return dict(sorted(self._packages.items()))

    def add(self, files: Mapping[str, str], packages: Mapping[str, str]) -> None:
        """Note what another process of the run has loaded: path -> hash of its content, and name -> version."""
        self._files = {**files, **self._files}
        self._packages = {**packages, **self._packages}

    def _note(self, top: str, path: str) -> None:
        folder = next((folder for folder in sites() if path.startswith(folder)), None)
        if folder is not None:
            package = _normal(path[len(folder) :].partition(os.sep)[0].removesuffix(".py"))
            if package in installed() and top not in self._roots and not top.startswith(references.FILE):
                self._packages[package] = installed()[package]
                return
        elif path.startswith(_interpreters()):
            return
        path = os.path.realpath(path)
        with suppress(OSError):
            written = os.stat(path).st_mtime_ns
            self._files[path] = content(path) if written < self._begun else _UNKNOWN


def digest(data: object) -> str:
    """A checksum of JSON data, whatever the order of its keys. Whoever edits the data can compute it anew."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def content(path: str) -> str:
    """The hash of a file's content; GONE where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:_DIGITS]
    except OSError:
        return GONE


@cache
def own() -> str:
    """The hash over every source file of fsdpcheck, fsdpcheck.impl and fsdpcheck.properties."""
    found = hashlib.sha256()
    for name in ("fsdpcheck", "fsdpcheck.impl", "fsdpcheck.properties"):
        spec = importlib.util.find_spec(name)
        for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
            for path in sorted(folder.rglob("*.py")):
                found.update(f"{name}/{path.relative_to(folder).as_posix()}\n{content(str(path))}\n".encode())
    return found.hexdigest()[:_DIGITS]


@cache
def installed() -> Mapping[str, str]:
    """Distribution, by normalised name -> version, of what is installed in the folders for it."""
    return {name: version for name, (version, _) in _distributions().items()}


@cache
def build(name: str) -> str:
    """Version and files of an installed distribution, "1.6.0 (9f86d081884c)"; GONE where it is not installed.

    The digits stand for the hashes that its RECORD has of its code; of a file that was written after RECORD, which an
    installer writes last, for its content. A file whose time was set back by hand is not seen to be edited.
    """
    if name not in installed():
        return GONE
    version, info = _distributions()[name]
    record = info / "RECORD"
    if not record.exists():
        return version
    finished, folder, rows = record.stat().st_mtime_ns, str(info.parent), []
    for file, kept, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        if kept and file.endswith(_CODE) and not file.startswith(("..", os.sep)):
            with suppress(OSError):  # of an optional file that was taken away nothing is loaded
                path = f"{folder}/{file}"
                rows.append((file, content(path) if os.stat(path).st_mtime_ns > finished else kept))
    return f"{version} ({digest(sorted(rows))[:_SHOWN]})"


@cache
def _distributions() -> Mapping[str, tuple[str, Path]]:
    """Distribution, by normalised name -> (version, folder of what its installer noted)."""
    folders = [folder for folder in sites() if os.path.isdir(folder)]
    names = (
        (re.fullmatch(r"(.+)-([^-]+)\.dist-info", name), Path(folder, name))
        for folder in folders
        for name in os.listdir(folder)
    )
    return {_normal(name[1]): (name[2], path) for name, path in names if name}


def _modules() -> Iterator[tuple[str, str]]:
    """(top package, file) of each loaded module that has a file; not of fsdpcheck, nor of what started the process."""
    for name, module in sys.modules.copy().items():
        found = getattr(module, "__dict__", {}).get("__file__")  # not by getattr: a lazy module would be loaded
        top = name.partition(".")[0]
        if isinstance(found, str) and top not in ("fsdpcheck", "__main__", "__mp_main__"):
            yield top, found


@cache
def _interpreters() -> tuple[str, ...]:
    """Prefixes of Python's own files, whose version is compared. Installed packages lie in folders inside them."""
    names = ("stdlib", "platstdlib")
    return _prefixes(map(sysconfig.get_path, names))


@cache
def sites() -> tuple[str, ...]:
    """Prefixes of the files of installed packages; of those of another environment, too, that a .pth file adds."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    added = [folder for folder in sys.path if os.path.basename(folder) in ("site-packages", "dist-packages")]
    return _prefixes([*folders, site.getusersitepackages(), *added])


def _prefixes(folders: Iterable[str]) -> tuple[str, ...]:
    """Of paths in ``folders``, with links in their names or without."""
    both = (spelt for folder in folders for spelt in (folder, os.path.realpath(folder)))
    return tuple(f"{folder}{os.sep}" for folder in dict.fromkeys(both))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _became(name: str, then: str, now: str, shown: bool = False) -> str:
    if then == _UNKNOWN:
        return f"{name} was written while the process ran that judged"
    if now == GONE:
        return f"{name} is gone"
    if then == now:
        return ""
    return f"{name} {then} became {now}" if shown else f"{name} changed"
