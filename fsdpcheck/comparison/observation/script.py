"""A script that is observed on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from fsdpcheck.comparison.observation.observer import Observer
from fsdpcheck.simulation.current_rank import require_rank
from fsdpcheck.simulation.programs.script import Runnable


@dataclass(frozen=True)
class ObservedScript:
    """Runs as ``script`` does, and the observer sees each rank of it."""

    script: Runnable
    observer: Observer

    def main(self, rank: int) -> ModuleType:
        """The module that a rank runs it in."""
        return self.script.main(rank)

    def run(self) -> None:
        """Run it on the rank that this is."""
        with self.observer.on_rank(require_rank()):
            self.script.run()
