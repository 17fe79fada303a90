"""State of an implementation's modules that its simulated ranks write to, over the runs of a session.

Whoever has a law that holds tries on real ranks what is written to (session). Not seen, beside what
simulation/shared_state.py says: runs that are not followed.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Hashable
from types import ModuleType

from fsdpcheck import adapters
from fsdpcheck.case import StepSpec, TrainingCase
from fsdpcheck.execution import RunRequest
from fsdpcheck.simulation.shared_locks import modules_of
from fsdpcheck.simulation.shared_state import SharedState


class SharedByRanks:
    """What the ranks of one implementation share."""

    def __init__(self, reference: str) -> None:
        self._reference, self._state = reference, SharedState()
        self._runs: collections.Counter[Hashable] = collections.Counter()
        self._modules: list[ModuleType] = []
        self._loaded = 0

    def begin(self, request: RunRequest) -> Callable[[int], None] | None:
        """Look before a run. Gives what is to be called whenever a rank leaves; None for a run that is not followed.

        Followed are, of each kind of run, the first and those of the numbers 2, 4, 8, ...: to look takes a tenth of a
        millisecond.
        """
        step = request.case.step if isinstance(request.case, TrainingCase) else StepSpec()
        kind = (step.private, step.norms, request.using, request.probes, bool(request.save_to))
        self._runs[kind] += 1
        if self._runs[kind] & (self._runs[kind] - 1):
            return None
        if len(sys.modules) != self._loaded:
            self._modules, self._loaded = modules_of(self._reference), len(sys.modules)
        features = adapters.features(self._reference)
        apart = {(module, name) for module, _, name in (dotted.partition(":") for dotted in features.rank_local)}
        self._state.begin(self._modules, frozenset(apart))
        return self._state.look

    def end(self) -> tuple[str, ...]:
        """Look after a run that is followed; the names of what was ever written to in a run of several ranks."""
        self._state.end()
        return tuple(self._state.written)
