"""Which lines and branches of an implementation simulated ranks run, measured by coverage.py, a context for each law.

The data are files of coverage.py, one a process, which its own commands read as well. What is measured: the
implementation's files and, of torch, the folders of FSDP; nothing of the harness, of Python's own or of other packages.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

from fsdpcheck import adapters
from fsdpcheck.compat import frames_private
from fsdpcheck.errors import MissingDependency

PREFIX = "covered"
"""Files of data are called so, and something that tells processes apart."""


class Covered:
    """Measures from its beginning on. Raises MissingDependency where coverage.py is not installed."""

    def __init__(self, folder: str, reference: str) -> None:
        try:
            from coverage import Coverage
        except ImportError:
            raise MissingDependency("--coverage needs coverage.py: pip install 'fsdpcheck[coverage]'") from None
        self._file, self._law = str(Path(folder) / PREFIX), ""
        self._coverage = Coverage(
            data_file=None,
            branch=True,
            config_file=False,
            include=patterns(reference),
            omit=[str(Path(found) / "faults" / "*") for found in _folders("fsdpcheck.impl")],
            messages=False,
        )
        self._ran: dict[str, set[tuple[int, int]]] = {}
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._coverage.start()

    def counts_for(self, law: str) -> None:
        """Keep what ran so far; what follows is of ``law``, "" for none."""
        from coverage import CoverageData

        self.newest()
        if self._ran:
            data = CoverageData(self._file, suffix=True)
            data.set_context(self._law)
            data.add_arcs(self._ran)
            data.close()
        self._ran, self._law = {}, law

    def newest(self) -> frozenset[int]:
        """Branches that ran since this was last asked, by number."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing ran is no news
            data = self._coverage.get_data()
        found = {file: set(data.arcs(file) or ()) for file in data.measured_files()}
        data.purge_files(found)
        for file, arcs in found.items():
            self._ran.setdefault(file, set()).update(arcs)
        branches = ((file, *arc) for file, arcs in found.items() for arc in arcs)
        return frozenset(self._numbers.setdefault(one, len(self._numbers)) for one in branches)


def patterns(reference: str) -> list[str]:
    """Globs of the files of an implementation that can be measured."""
    place = reference.partition(":")[0]
    if adapters.is_builtin(reference):
        own = [*_files_of("fsdpcheck.impl"), *map(str, adapters.files_of(place))]
    else:
        own = [str(Path(place).resolve().parent / "*")] if place.endswith(".py") else _files_of(place.partition(".")[0])
    return [*frames_private.folders_of_units(), *own]


def _files_of(module: str) -> list[str]:
    """Those of a package, or that of a module."""
    found = importlib.util.find_spec(module)
    alone = found is not None and found.submodule_search_locations is None and found.origin
    return [alone] if alone else [str(Path(folder) / "*") for folder in _folders(module)]


def _folders(package: str) -> list[str]:
    found = importlib.util.find_spec(package)
    return [*(found.submodule_search_locations or ())] if found is not None else []
