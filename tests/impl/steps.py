"""Small models, their steps on one device sample by sample, and the same steps sharded both ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.adapters.training_loop import local
from fsdpcheck.impl.clipping.batch_layout import REPLICATED
from fsdpcheck.impl.clipping.private_backward import Norms
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer

SIZES = {1: [4], 2: [3, 1], 3: [2, 0, 2], 4: [1, 0, 3, 0]}
"""Samples of each rank, by world size; four in all."""
UNITS = ["0", "1"]


def integers(*shape: int, seed: int, bound: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=generator).double()


def model(kind: str) -> nn.Sequential:
    first: nn.Module = nn.Embedding(5, 3, padding_idx=0) if kind == "tokens" else nn.Linear(3, 3)
    built = nn.Sequential(
        nn.Sequential(first, nn.LeakyReLU(0.5)), nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.5)), nn.Linear(5, 2)
    ).double()
    for seed, parameter in enumerate(built.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    if kind == "tokens":
        first.get_parameter("weight").data[0] = 0
    if kind == "frozen":
        built.get_parameter("0.0.bias").requires_grad_(False)
        built.get_parameter("1.0.weight").requires_grad_(False)
        built.get_parameter("2.weight").requires_grad_(False)
    return built


def flat(module: nn.Module, axis: Axis | None = None) -> ShardedModel:
    """Sharded in flat buffers over ``axis``, by default all ranks."""
    return ShardedModel(module, UNITS, axis or collectives.axis(), reshard_after_forward=True)


WAYS = {
    "flat": lambda module, reshard: ShardedModel(module, UNITS, collectives.axis(), reshard),
    "per-parameter": lambda module, reshard: PerParameterModel(
        module, UNITS, init_device_mesh("cpu", (collectives.axis().size,)), reshard
    ),
}


def inputs(kind: str) -> Tensor:
    if kind == "tokens":
        return torch.tensor([[1, 1, 4], [0, 2, 2], [3, 0, 3], [4, 4, 4]])
    return integers(4, 3, 3, seed=20) if kind == "sequence" else integers(4, 3, seed=20)


@dataclass(frozen=True)
class Loss:
    """0.5 * sum of squared errors of each sample, times ``scale`` (W, so that averages are exact)."""

    scale: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).flatten(1).square().sum(1) * self.scale


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.5, weight_decay=0.5, foreach=False)


def project(tensors: Iterable[Tensor]) -> None:
    """Back to small integers between steps, elementwise, so that the next step is exact again."""
    for tensor in tensors:
        tensor.detach().round_().clamp_(-2, 2)


@dataclass
class Single:
    """One device, one sample at a time."""

    norms: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def single_device(kind: str, scale: float, normaliser: int, steps: int = 2) -> Single:
    alone, x, loss = model(kind), inputs(kind), Loss(scale)
    trainable = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    optimizer = sgd(trainable.values())
    for step in range(steps):
        if step:
            project(trainable.values())
        squared = []
        total = {name: torch.zeros_like(p) for name, p in trainable.items()}
        for i in range(len(x)):
            output = alone(x[i : i + 1])
            found = torch.autograd.grad(loss(output, torch.zeros_like(output)).sum(), list(trainable.values()))
            squared.append(sum(float(g.square().sum()) for g in found))
            for name, gradient in zip(trainable, found, strict=True):
                total[name] += gradient
        for name, parameter in trainable.items():
            parameter.grad = total[name] / normaliser
        optimizer.step()
    gradients = {name: value / normaliser for name, value in total.items()}
    values = {name: p.detach() for name, p in alone.named_parameters()}
    return Single(torch.tensor(squared, dtype=torch.float64).sqrt(), gradients, values)


def micro_batches(x: Tensor, rows: list[int], count: int, outputs: Tensor) -> list[MicroBatch]:
    """Rows dealt out to ``count`` micro-batches, the later ones maybe empty."""
    return [
        MicroBatch(x[rows[k::count]], torch.zeros_like(outputs[rows[k::count]]), rows[k::count]) for k in range(count)
    ]


@dataclass
class Sharded:
    norms: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    indices: list[int]
    grad_norm: Tensor | None


def sharded(
    kind: str,
    rank: int,
    world_size: int,
    options: Options,
    count: int = 1,
    way: str = "flat",
    reshard: bool = True,
    steps: int = 2,
) -> Sharded:
    """``steps`` steps on this rank's rows."""
    with torch.no_grad():
        outputs = model(kind)(inputs(kind))
    trainer = Trainer(WAYS[way](model(kind), reshard), Loss(world_size), sgd, options)
    start = sum(SIZES[world_size][:rank])
    rows = list(range(4)) if options.layout == REPLICATED else list(range(start, start + SIZES[world_size][rank]))
    for step in range(steps):
        if step:
            project([local(shard) for shard in trainer.model.shards()])
        trainer.step(micro_batches(inputs(kind), rows, count, outputs))
    found = trainer.found if options.privacy else Norms()
    norms = torch.cat(found.norms) if found.norms else torch.empty(0)
    values = trainer.model.full_values()
    return Sharded(norms, trainer.model.full_gradients(), values, found.indices, trainer.grad_norm)


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name
