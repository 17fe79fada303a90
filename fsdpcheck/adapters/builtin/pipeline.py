"""PyTorch's pipeline parallel, ``torch.distributed.pipelining``; with data ranks too, ``fully_shard`` of each stage.

A stage is a run of layers. Each sample is a micro-batch of the schedule, for it takes equally large ones alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdpcheck.adapters.contract import Batch, Features, GlobalNormRule, Part, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, mesh_of, whole


class Stage(nn.Module):
    """Consecutive layers of the model by their names; the last stage flattens, and has the gauge beside them."""

    def __init__(self, layers: dict[str, nn.Module], gauge: nn.Module | None) -> None:
        super().__init__()
        self.names, self.layers, self.gauge = list(layers), nn.ModuleList(layers.values()), gauge

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        if self.gauge is None:
            return hidden
        return torch.cat([hidden.flatten(1), self.gauge(hidden.new_ones(len(hidden), 1))], 1)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters by their names in the model."""
        for name, layer in zip(self.names, self.layers, strict=True):
            yield from layer.named_parameters(name)
        if self.gauge is not None:
            yield from self.gauge.named_parameters("instrument")


class Loop(TrainingLoop):
    def __init__(
        self, stage: PipelineStage, module: Stage, everything: dict[str, nn.Parameter], setup: Setup, schedule: Any
    ) -> None:
        unused = [nn.Parameter(torch.zeros(1, dtype=torch.float64))]  # an optimizer takes no empty list
        super().__init__(module, setup, optimizer=setup.optimizer(list(module.parameters()) or unused))
        self._stage, self._module, self._all, self._schedule = stage, module, everything, schedule
        self._nothing = everything["instrument.weight"].new_empty(0)

    def accumulate(self, batch: Batch) -> None:
        inputs = torch.cat([micro.inputs for micro in batch.micro_batches])
        targets = torch.cat([micro.targets for micro in batch.micro_batches])

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            found: Tensor = self.setup.loss(outputs, targets).sum() * batch.loss_scale
            return found

        kind = self._schedule if len(inputs) >= self._stage.num_stages else ScheduleGPipe  # 1F1B takes no fewer
        schedule = kind(self._stage, len(inputs), loss_fn=loss, scale_grads=False)
        first, last = self._stage.is_first, self._stage.is_last
        schedule.step(*[inputs] * first, target=targets if last else None)

    def clip(self, limit: float) -> Tensor:
        """By the norm of all stages' gradients: each rank has those of its own stage."""
        gradients = [value.grad for value in self._module.parameters() if value.grad is not None]
        norm = whole(get_total_norm(gradients)) if gradients else self._nothing.sum()
        squared = norm.square()
        dist.all_reduce(squared, group=self._stage.group)
        total = squared.sqrt()
        clip_grads_with_norm_(self._module.parameters(), limit, total)
        return total

    def parameters(self) -> Mapping[str, Tensor | Part]:
        return self._shown(lambda parameter: parameter)

    def gradients(self) -> Mapping[str, Tensor | Part | None]:
        return self._shown(lambda parameter: parameter.grad)

    def _shown(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | Part]:
        """Each tensor is on the stage that has its layer, a part of no values on the others."""
        own, found = dict(self._module.named()), dict[str, Tensor | Part]()
        for name, parameter in self._all.items():
            value = of(own[name]) if name in own else None
            if value is None:
                found[name] = Part(self._nothing, tuple(parameter.shape), frozenset({"dp_shard", "pp"}), start=0)
            else:
                found[name] = Part(value, tuple(parameter.shape), frozenset({"dp_shard", "pp"}))
        return found


class Pipeline:
    features = Features(
        promises=frozenset({"plain", "global-norm"}),
        accepts=ORDINARY
        - {"tied", "frozen", "conv", "bags", "mean", "empty-rank", "hsdp", "own-layers", "bfloat16", "tf32", "real"}
        - {"evaluation", "inference-mode", "reused", "one-row"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        global_norm=GlobalNormRule(nested=True, dtype="case", eps=1e-6),
        axes=frozenset({"dp_shard", "pp"}),
        reasons={**PLAIN_REASONS, "thawing": "accepts nothing that is frozen"},
    )

    def __init__(self, name: str, schedule: Any) -> None:
        self.name, self._schedule = name, schedule

    def build(self, model: Any, setup: Setup) -> TrainingLoop:
        both = mesh_of(setup, "dp_shard", "pp")
        mesh = both["pp"]
        chains = [(f"units.{i}", unit) for i, unit in enumerate(model.units)] + [("tail", model.tail)]
        layers = [(f"{place}.{name}", layer) for place, chain in chains for name, layer in chain.named_children()]
        stages, rank = mesh.size(), mesh.get_local_rank()
        cuts = [-(-len(layers) * place // stages) for place in range(stages + 1)]
        module = Stage(dict(layers[cuts[rank] : cuts[rank + 1]]), model.instrument if rank == stages - 1 else None)
        everything = dict(model.named_parameters())
        if setup.mesh.dp_shard > 1:
            fully_shard(module, mesh=both["dp_shard"])
        stage = PipelineStage(module, rank, stages, setup.device, group=mesh.get_group())
        return Loop(stage, module, everything, setup, self._schedule)


adapter = Pipeline("pipeline", ScheduleGPipe)
one_f_one_b = Pipeline("pipeline, 1F1B", Schedule1F1B)
