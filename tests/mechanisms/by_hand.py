"""Models, and what is done with them on ranks, for situations in which a mechanism changes something."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.impl import kernels, state
from fsdpcheck.impl.clipping import clip_factors
from fsdpcheck.impl.kernels import torch_norms
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.sampling.epochs import EpochSampler
from fsdpcheck.impl.sampling.poisson import PoissonSampler
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.trainer import Trainer
from tests.mechanisms.training import (
    Setting,
    adam,
    filled,
    flat,
    numbers,
    per_parameter,
    private,
    replicated,
    seen,
    two_layers,
)

HALVES = ([[0, 1]], [[2, 3]])
TWO_OF_ONE = ([[0], [1]], [[2], [3]])
FOUR = ([[0]], [[1]], [[2]], [[3]])


@dataclass(frozen=True)
class Situation:
    """``body(rank, folder)`` on so many ranks, with an empty folder that all of them reach."""

    body: Callable[[int, Path], Any]
    ranks: int = 1


def alone(body: Callable[[], Any]) -> Situation:
    return Situation(lambda rank, folder: body())


def training(**options: Any) -> Situation:
    setting = Setting(**options)
    return Situation(lambda rank, folder: setting(rank), len(setting.rows))


def of_layer(layer: Callable[[], nn.Module], x: Tensor, **options: Any) -> Situation:
    """A private step of one layer, the mean of whose outputs is learnt."""

    def meant(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs.flatten(1) * numbers(outputs[0].numel(), seed=3)).sum(1).square()

    def built() -> nn.Module:
        return filled(nn.Sequential(layer()))

    return training(model=built, x=x, loss=meant, privacy=private(), **options)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return mixed


class Tied(nn.Module):
    """Two layers of one weight, both in the unit "0"."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
        first, _, second = self.get_submodule("0").children()
        second.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule("0")(x)[:, :2]
        return found


class Unused(nn.Module):
    """Runs a layer whose output it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(3, 2))
        self.dropped = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        found: Tensor = self.get_submodule("0")(x)
        return found


class Buffered(nn.Module):
    """Adds a buffer of each kind, and was built otherwise on each rank."""

    kept: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(3, 2))
        rank = collectives.axis().rank
        self.register_buffer("kept", torch.full((2,), 1.0 + rank))
        self.register_buffer("passing", torch.full((2,), 3.0 + rank), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule("0")(x) * self.kept + self.passing
        return found


def tied() -> nn.Module:
    return filled(Tied())


def frozen_bias() -> nn.Module:
    module = two_layers()
    module.get_parameter("0.bias").requires_grad_(False)
    return module


def in_float32() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.float32)


def mixed(**options: Any) -> Situation:
    """Computes in bfloat16, with shards in float32."""
    x, y = numbers(4, 3, seed=20).bfloat16(), numbers(4, 2, seed=21).float()

    def of_wide(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs.float() - targets).square().sum(1)

    way = partial(flat, compute_dtype=torch.bfloat16)
    return training(model=in_float32, x=x, y=y, loss=of_wide, way=way, **options)


def ignoring(**options: Any) -> Situation:
    return training(way=partial(per_parameter, ignored=["2.weight"]), rows=TWO_OF_ONE, **options)


def in_dataset_order(rank: int, folder: Path) -> Any:
    setting = Setting(([[1, 0]], [[3, 2]]), privacy=private())
    trainer = setting.trainer()
    trainer.step(setting.batches(rank))
    found = trainer.norms_in_dataset_order(4)
    return found.indices, found.values


def evaluated_before_step(rank: int, folder: Path) -> Any:
    setting = Setting(privacy=private())
    trainer = setting.trainer()
    trainer.step(setting.batches(rank))
    trainer.model(setting.x[:3])
    trainer.step(setting.batches(rank))
    return seen(trainer)


def kernel_of_odd_sizes() -> Any:
    from fsdpcheck.impl.kernels import triton_norms

    a, g = numbers(2, 3, 20, seed=1).float(), numbers(2, 3, 20, seed=2).float()
    assert kernels.implementation(a, g) is triton_norms, "needs Triton, and TRITON_INTERPRET=1 before it is imported"
    found = triton_norms.direct_squared_norm(a, g, triton_norms.Tiles(16, 16, 16))
    return bool(torch.allclose(found, torch_norms.direct_squared_norm(a, g)))


def noise_of_large() -> Any:
    drawn = gaussian.seeded(3).normal("large", 0, 0, 2**16, 1.0, torch.float64, torch.device("cpu"))
    return torch.equal(*drawn.chunk(2))


def sampler(share: int, shares: int, key: int = 5, **options: Any) -> EpochSampler:
    return EpochSampler(10, 2, gaussian.seeded(key), axis=Axis(None, share, shares), **options)


def dealt(**options: Any) -> Situation:
    def body() -> Any:
        return [[list(sampler(share, 3, **options).steps(epoch)) for share in range(3)] for epoch in range(2)]

    return alone(body)


def poisson() -> Any:
    samplers = [PoissonSampler(10, 0.5, 2, gaussian.seeded(5), Axis(None, share, 3)) for share in range(3)]
    return [drawing.draw(step) for drawing in samplers for step in range(4)]


def resumed(after: Callable[[Trainer], None] = lambda trainer: None, **options: Any) -> Situation:
    """A step, saved and loaded into a new trainer, and a step of that one; with the sizes of the files."""
    setting = Setting(**{"rows": HALVES, "optimizer": adam, **options})

    def body(rank: int, folder: Path) -> Any:
        trainer = setting.trainer()
        trainer.step(setting.batches(rank))
        after(trainer)
        state.save(folder, trainer.model, trainer.optimizer)
        new = setting.trainer()
        state.load(folder, new.model, new.optimizer)
        new.step(setting.batches(rank))
        return seen(new), sorted(file.stat().st_size for file in folder.glob("*.distcp"))

    return Situation(body, len(setting.rows))


def halved(trainer: Trainer) -> None:
    """As a schedule does to the learning rate."""
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        group["lr"] /= 2


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = parameters
    groups: list[dict[str, Any]] = [{"params": [first], "weight_decay": 0.5}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.5, foreach=False)


def loaded_while_gathered(rank: int, folder: Path) -> Any:
    setting = Setting(HALVES)
    trainer = setting.trainer()
    state.save(folder, trainer.model)
    trainer.step(setting.batches(rank))
    trainer.model(setting.x)
    state.load(folder, trainer.model)
    return trainer.model(setting.x)


def initial(rank: int, folder: Path) -> Any:
    """What each rank computes with rank 0's parameters and buffers, of two replicas of two shards."""
    way = replicated(2, 2, sync_module_states=True)
    return way(filled(Buffered(), torch.float32))(torch.ones(1, 3))


def gathered_on_first(rank: int, folder: Path) -> Any:
    return state.full_state_dict(replicated(2, 2)(two_layers()), everywhere=False)


def thawed(rank: int, folder: Path) -> Any:
    setting = Setting(model=frozen_bias)
    trainer = setting.trainer()
    trainer.step(setting.batches(rank))
    trainer.model.module.get_parameter("0.bias").requires_grad_(True)
    trainer.step(setting.batches(rank))
    return seen(trainer)


def frozen_in_backward(rank: int, folder: Path) -> Any:
    """Whether a frozen unit is still gathered when an earlier layer has had its backward."""
    module = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    module.get_submodule("1").requires_grad_(False)
    model = ShardedModel(module, ["1"], collectives.axis(), reshard_after_forward=True)
    gathered: list[bool] = []

    def watch(layer: nn.Module, given: Any, output: Tensor) -> None:
        assert output.grad_fn is not None
        output.grad_fn.register_hook(lambda *_: gathered.append(model.units[1].is_unsharded))

    module.get_submodule("0").register_forward_hook(watch)
    outputs = model(numbers(2, 3, seed=4))
    model.backward(outputs, torch.ones_like(outputs))
    return gathered


def spoiled(sample: int) -> Tensor:
    """Targets, of one sample without a number."""
    found = numbers(4, 2, seed=21)
    found[sample] = float("nan")
    return found


def overflowed(rank: int, folder: Path) -> Any:
    """Of one layer whose gradient is infinite in what the second rank owns."""
    module = filled(nn.Sequential(nn.Linear(3, 2, bias=False)))
    setting = Setting(HALVES, model=lambda: module, max_grad_norm=1.0, steps=0)
    trainer = setting.trainer()
    (shard,) = trainer.model.shards()
    shard.grad = torch.full_like(shard, float("inf") if rank else 1.0)
    return clip_factors.clip_global_norm(trainer.model, 1.0)
