"""Simulated ranks that run a plain function of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import Execution, RankResult, RunRequest


class Ranks:
    """``ranks(body, world_size)`` calls body(rank) on every rank and returns what each returned, in rank order."""

    def __init__(self) -> None:
        self.engine = InProcessEngine(program=self._program)
        self.body: Callable[[int], Any] | None = None
        self.returned: dict[int, Any] = {}
        self.execution: Execution | None = None

    def _program(self, request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        assert self.body is not None
        self.returned[rank] = self.body(rank)

    def __call__(self, body: Callable[[int], Any], world_size: int) -> list[Any]:
        self.execution = self.run(body, world_size)
        assert self.execution.failure is None, self.execution.failure.text
        return [self.returned[rank] for rank in range(world_size)]

    def run(self, body: Callable[[int], Any], world_size: int) -> Execution:
        """The execution, whatever came of it."""
        self.body, self.returned = body, {}
        case = TrainingCase(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=world_size))
        return self.engine.run(RunRequest(case, "reference"))

    def trace(self, rank: int) -> list[tuple[str, str]]:
        """(operation, subject) of the rank's collectives in the newest run."""
        assert self.execution is not None
        return [(call.op, call.subject) for call in self.execution.ranks[rank].trace]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    simulated = Ranks()
    yield simulated
    simulated.engine.close()
