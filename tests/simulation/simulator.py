"""Simulated ranks that run a plain function, what came of it, and tensors kept for the test."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import Execution, RankResult, RunRequest, SchedulePolicy

Body = Callable[[int, int, RankResult], None]


class Simulator:
    """Runs a plain function of (rank, world size, result) on simulated ranks."""

    def __init__(self) -> None:
        self.engine = InProcessEngine(program=self._program)
        self.body: Body | None = None

    def _program(self, request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        assert self.body is not None
        self.body(rank, request.case.world_size, result)

    def __call__(
        self, body: Body, world_size: int = 2, schedule: SchedulePolicy = "forward", adapter: str = "fully_shard"
    ) -> Execution:
        self.body = body
        case = TrainingCase(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=world_size))
        return self.engine.run(RunRequest(case, adapter, schedule=schedule))


def failure_of(execution: Execution, kind: str) -> str:
    assert execution.failure is not None, "the run completed"
    assert execution.failure.kind == kind, execution.failure.text
    return execution.failure.text


def keep(result: RankResult, **tensors: torch.Tensor) -> None:
    result.initial.update({name: tensor.clone() for name, tensor in tensors.items()})


def skips(rank: int, size: int, result: RankResult) -> None:
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))
