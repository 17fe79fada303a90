"""The own tests of Opacus and PyTorch: which run here, which execute a fault's line, and which fail with the fault.

A fault is found by a test that passes without it and fails with it, twice; it is missed if a test that passes executes
its line. Tests that do not pass here without a fault, that their own decorators leave out or that take too long do not
count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.plugin import VARIABLE, Plan

LIMIT: Final = {"opacus": 25.0, "fully_shard": 45.0}
"""Seconds of a test without a fault; those that take longer are counted as too slow."""
_ROOT: Final = Path(__file__).parents[2]
_POLL: Final = 2.0


@dataclass(frozen=True)
class OwnTests:
    """Of one side. ``folder``: where PyTorch's test files lie; those of Opacus lie in its package."""

    side: str
    folder: str

    def rows(self, faults: Sequence[str], baseline: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Rows of the record, less arm and commit, as they come: first that without a fault, if ``baseline`` is {}."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows"
            plan = Plan(self.side, str(file), LIMIT[self.side], [*faults], baseline)
            path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, VARIABLE: plan.to_json(), "PYTHONPATH": path}
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(
                self._command(), cwd=self._root(), env=environment, stdin=quiet, stdout=quiet, stderr=quiet
            )
            try:
                yield from _lines(process, file)
            finally:
                process.kill()
                process.wait()

    def _command(self) -> list[str]:
        """One draw of Hypothesis for all runs."""
        return [
            sys.executable, "-P", "-m", "pytest", "-q", "-p", "benchmarks.side_by_side.plugin", "-p",
            "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(self._root()), "--hypothesis-seed=0",
            "tests" if self.side == "opacus" else ".",
        ]  # fmt: skip

    def _root(self) -> Path:
        if self.side != "opacus":
            return Path(self.folder).resolve()
        found = importlib.util.find_spec("opacus")
        assert found is not None, "Opacus is not installed"
        assert found.origin is not None
        return Path(found.origin).parent


def _lines(process: subprocess.Popen[bytes], file: Path) -> Iterator[dict[str, Any]]:
    """Each line that the process writes, until it ends."""
    given, ended = 0, False
    while not ended:
        try:
            process.wait(_POLL)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        yield from map(json.loads, lines[given:])
        given = len(lines)
