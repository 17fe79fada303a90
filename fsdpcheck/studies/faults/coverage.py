"""Reached: the lines of an implementation that the cases of each law run, measured by coverage.py."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdpcheck import engines
from fsdpcheck.errors import MissingDependency
from fsdpcheck.studies.faults.matrix import Matrix, Place


def measure(matrix: Matrix, adapters: Sequence[str], told: Callable[[str, str], None]) -> set[Place]:
    """All lines that run; ``matrix`` gets those of each adapter and law. ``told`` hears of each pair as it begins.

    A law that does not hold without a fault is measured all the same. Raises MissingDependency without coverage.py.
    """
    if importlib.util.find_spec("coverage") is None:
        raise MissingDependency("--mutants needs coverage.py; next: pip install 'fsdpcheck[coverage]'")
    with tempfile.TemporaryDirectory(prefix="fsdpcheck-faults-") as folder:
        pairs = [(adapter, law) for adapter in adapters for law in matrix.laws(adapter)]
        engines.cover(folder, "")
        for number, (adapter, law) in enumerate(pairs):
            told(adapter, law.name)
            engines.cover(folder, str(number))
            matrix.unplanted(adapter, law)
        engines.cover(folder, "")
        engines.uncover()
        found = _by_context(Path(folder))
    matrix.lines = {(adapter, law.name): found.get(str(at), set()) for at, (adapter, law) in enumerate(pairs)}
    return set().union(*matrix.lines.values())


def _by_context(folder: Path) -> dict[str, set[Place]]:
    from coverage import Coverage
    from coverage.exceptions import NoDataError

    whole = Coverage(data_file=None, branch=True, config_file=False, messages=False)
    try:
        whole.combine([str(part) for part in folder.iterdir()], keep=True)
    except NoDataError:
        return {}
    data = whole.get_data()
    found: dict[str, set[Place]] = {}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                found.setdefault(context, set()).add((file, line))
    return found
