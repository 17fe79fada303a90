"""Lab: what a check measures with. Simulated ranks that run a function of the rank, and runs of cases by adapters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution import Execution, Failure, RankResult, RunRequest, SchedulePolicy
from fsdpcheck.execution.trace import Trace
from fsdpcheck.judging.run import Run


class RanksFailed(FsdpcheckError):
    """Ranks of a check that have to finish did not: the row is shown as an error."""


def message(failure: Failure) -> str:
    """The exception that a rank raised, with its message, of a report: the last line but for notes."""
    lines = [line.strip() for line in failure.text.splitlines()]
    return next((line for line in reversed(lines) if line.startswith(f"{failure.exception}:")), lines[-1])


class Lab:
    """One for a whole ledger; rank threads persist between checks."""

    def __init__(self) -> None:
        self._programs = InProcessEngine(program=self._program)
        self._cases = InProcessEngine()
        self._body: Callable[[int], Any] = lambda rank: None
        self._returned: dict[int, Any] = {}
        self.last: Execution | None = None

    def ranks(self, body: Callable[[int], Any], world_size: int) -> list[Any]:
        """What ``body(rank)`` returned on each of ``world_size`` ranks of an initialised group.

        Raises RanksFailed, with the report, if they hang or raise.
        """
        execution = self.attempt(body, world_size)
        if execution.failure is not None:
            raise RanksFailed(execution.failure.text)
        return self.returned

    def attempt(self, body: Callable[[int], Any], world_size: int, schedule: SchedulePolicy = "forward") -> Execution:
        """The execution of ``body`` on all ranks, in this order of ranks, whatever came of it."""
        self._body, self._returned = body, {}
        case = TrainingCase(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=world_size))
        self.last = self._programs.run(RunRequest(case, "reference", schedule=schedule))
        return self.last

    @property
    def returned(self) -> list[Any]:
        """What each rank returned in the newest ``ranks`` or ``attempt``; shorter if some did not."""
        return [self._returned[rank] for rank in sorted(self._returned)]

    def trace(self, rank: int = 0) -> Trace:
        """The collectives of one rank in the newest ``ranks`` or ``attempt``."""
        assert self.last is not None
        return self.last.ranks[rank].trace

    def run(self, adapter: str, *installs: str) -> Run:
        """Cases by an adapter on simulated ranks, with faults planted."""
        return Run(self._cases, adapter, installs)

    def close(self) -> None:
        """End the ranks."""
        self._programs.close()
        self._cases.close()

    def _program(self, request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        self._returned[rank] = self._body(rank)


def impl(name: str) -> Any:
    """A module of the reference implementation, reached by its name: ``impl("clipping.norm_aggregation")``."""
    return importlib.import_module(f"fsdpcheck.impl.{name}")
