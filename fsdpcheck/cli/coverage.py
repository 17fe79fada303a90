"""`fsdpcheck run --coverage FILE`: what the session measured, as a file of coverage.py, and what no case reached."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdpcheck.errors import MissingDependency, UsageError, explain
from fsdpcheck.report.colour import Paint


@contextmanager
def measured(options: argparse.Namespace) -> Iterator[str]:
    """A folder for what is measured. Raises UsageError for what cannot be, before anything is judged."""
    if importlib.util.find_spec("coverage") is None:
        raise MissingDependency("--coverage needs coverage.py; next: pip install 'fsdpcheck[coverage]'")
    if options.engine != "simulated" or "TORCHELASTIC_RUN_ID" in os.environ:
        got = "torchrun" if options.engine == "simulated" else f"--engine {options.engine}"
        raise UsageError(explain("--coverage measures simulated ranks", got=got, then="leave one of the two out"))
    if options.resume:
        what = "--coverage measures a whole session"
        raise UsageError(explain(what, got="--resume", then="leave --resume out, or --coverage"))
    if not options.coverage.parent.is_dir() or options.coverage.is_dir():
        got, then = options.coverage, "make its folder, or name another"
        raise UsageError(explain("--coverage FILE cannot be written", got=got, wanted="a file in a folder", then=then))
    with tempfile.TemporaryDirectory(prefix="fsdpcheck-coverage-") as folder:
        yield folder


def reached(folder: str, file: Path, paint: Paint) -> str:
    """Puts what was measured into ``file``, and says what ran and what no case reached."""
    from fsdpcheck.report import coverage

    return coverage.text(coverage.combined(Path(folder), file), file, paint)
