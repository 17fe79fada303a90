"""Engine: one way of having ranks. One driver, W followers; every engine passes tests/engines/test_contract.py."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from fsdpcheck.adapters.contract import Stored
from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import TrainingCase
from fsdpcheck.execution import Execution, RunRequest

TORCHRUN: Final = "torchrun"
"""The engine whose number of ranks nobody chooses case by case."""


class Engine(Protocol):
    """Runs requests one after another; ranks persist between runs, and a failed run leaks nothing into the next.

    ``run`` never raises for what a rank does (that is ``Execution.failure``); it raises UsageError for a request it
    cannot serve at all, and KeyboardInterrupt after cleaning up. ``close`` ends ranks; it may be called twice.
    ``declared``: what the implementation that a reference names declares, read where its ranks run; raises what
    adapters.load raises. ``stored`` and ``read``: what it finds in a checkpoint (program/checkpoints.py). ``settle``:
    what ranks have left changed of their process that no run has told; put back. ``kind``: its ranks, as
    _common/metal.py names them.
    """

    name: str
    kind: str

    def run(self, request: RunRequest) -> Execution: ...

    def declared(self, reference: str) -> Declaration: ...

    def stored(self, reference: str, folder: str) -> list[Stored]: ...

    def read(self, reference: str, folder: str, case: TrainingCase) -> dict[str, Tensor]: ...

    def settle(self) -> tuple[str, ...]: ...

    def close(self) -> None: ...
