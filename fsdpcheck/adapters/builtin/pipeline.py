"""PyTorch's pipeline parallel, ``torch.distributed.pipelining``; with data ranks too, ``fully_shard`` of each stage.

A stage is a run of layers. Each sample is a micro-batch of the schedule, for it takes equally large ones alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdpcheck.adapters.contract import Batch, Features, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, mesh_of, whole


class Last(nn.Module):
    """Behind the last layer: flattens, and puts the gauge beside it."""

    def __init__(self, gauge: nn.Module) -> None:
        super().__init__()
        self.gauge = gauge

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden.flatten(1), self.gauge(hidden.new_ones(len(hidden), 1))], 1)


class Loop(TrainingLoop):
    def __init__(self, stage: PipelineStage, model: nn.Module, setup: Setup, schedule: Any, dtype: Any) -> None:
        super().__init__(model, setup)
        self._stage, self._schedule, self._dtype = stage, schedule, dtype

    def accumulate(self, batch: Batch) -> None:
        inputs = torch.cat([micro.inputs for micro in batch.micro_batches])
        targets = torch.cat([micro.targets for micro in batch.micro_batches])
        loss = lambda outputs, targets: self.setup.loss(outputs, targets).sum() * batch.loss_scale  # noqa: E731
        kind = self._schedule if len(inputs) >= self._stage.num_stages else ScheduleGPipe  # 1F1B takes no fewer
        schedule = kind(self._stage, len(inputs), loss_fn=loss, scale_grads=False)
        schedule.step(*[inputs] * self._stage.is_first, target=targets if self._stage.is_last else None)

    def clip(self, limit: float) -> Tensor:
        """By the norm of all stages' gradients: each rank has those of its own stage."""
        gradients = [value.grad for value in self.model.parameters() if value.grad is not None]
        squared = whole(get_total_norm(gradients)).to(self._dtype).square()  # of no gradients it is float32
        torch.distributed.all_reduce(squared, group=self._stage.group)
        clip_grads_with_norm_(self.model.parameters(), limit, squared.sqrt())
        return squared.sqrt()


class Pipeline:
    features = Features(
        promises=frozenset({"plain", "global-norm"}),
        accepts=ORDINARY
        - {"tied", "frozen", "conv", "bags", "mean", "empty-rank", "hsdp", "own-layers", "bfloat16", "tf32", "real"}
        - {"evaluation", "inference-mode", "reused", "one-row"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        axes=frozenset({"dp_shard", "pp"}),
        owned=frozenset({"pp"}),
        reasons={**PLAIN_REASONS, "thawing": "accepts nothing that is frozen"},
    )

    def __init__(self, name: str, schedule: Any) -> None:
        self.name, self._schedule = name, schedule

    def build(self, model: Any, setup: Setup) -> TrainingLoop:
        """Layers of other stages are taken out of the model, whose parameters are then this stage's."""
        mesh = mesh_of(setup, "dp_shard", "pp")
        layers = [(chain, *named) for chain in (*model.units, model.tail) for named in chain.named_children()]
        layers.append((model, "instrument", Last(model.instrument)))
        stages, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
        first, end = (-(-len(layers) * place // stages) for place in (rank, rank + 1))
        for owner, name, _ in (*layers[:first], *layers[end:]):
            delattr(owner, name)
        module = nn.Sequential(*[layer for *_, layer in layers[first:end]])
        if setup.mesh.dp_shard > 1:
            fully_shard(module, mesh=mesh["dp_shard"])
        stage = PipelineStage(module, rank, stages, setup.device, group=mesh.get_group("pp"))
        return Loop(stage, model, setup, self._schedule, layers[-1][-1].gauge.weight.dtype)


adapter = Pipeline("pipeline", ScheduleGPipe)
one_f_one_b = Pipeline("pipeline, 1F1B", Schedule1F1B)
