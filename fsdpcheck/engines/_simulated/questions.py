"""What is asked of the process of simulated ranks (engines/_simulated/service.py), as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcheck.case import TrainingCase
from fsdpcheck.execution import RunRequest


@dataclass(frozen=True)
class Settings:
    """Of an engine: see InProcessEngine."""

    device: str
    budget_seconds: float | None
    limit_seconds: float


@dataclass(frozen=True)
class Declare:
    """Load the adapter; the answer is its Declaration."""

    reference: str


@dataclass(frozen=True)
class Simulate:
    """Run the request; the answer is its Execution, without the request."""

    request: RunRequest
    settings: Settings


@dataclass(frozen=True)
class Require:
    """Raise UsageError for a name among ``installs`` that is none where the implementation has been imported."""

    reference: str
    installs: tuple[str, ...]


@dataclass(frozen=True)
class Installs:
    """The answer is what the module holds that can be installed (engines/_common/patches.py), where the implementation
    has been imported."""

    reference: str
    module: str


@dataclass(frozen=True)
class Stored:
    """The answer is what lies in the checkpoint (program.checkpoints.stored)."""

    reference: str
    folder: str


@dataclass(frozen=True)
class Read:
    """The answer is what an unsharded model of ``case`` reads from the checkpoint (program.checkpoints.read)."""

    reference: str
    folder: str
    case: TrainingCase


@dataclass(frozen=True)
class Settle:
    """The answer is what ranks have left changed that no run has told (process_state.settled)."""


@dataclass(frozen=True)
class Cover:
    """From now on what runs of the implementation counts for ``law``, "" for none; what ran so far is kept in
    ``folder`` (engines/_simulated/coverage.py)."""

    folder: str
    reference: str
    law: str


@dataclass(frozen=True)
class Close:
    """End the ranks of an engine; nothing is answered but None."""

    settings: Settings
