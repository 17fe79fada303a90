"""Private steps of models whose units are cut and used in every way, against autograd, one sample at a time.

Units in units, a unit that runs twice or not at all, frozen ones and such with one frozen parameter, recomputed ones,
rows fewer than ranks, no unit: both ways of sharding, replicas, every mode. All values are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdpcheck.impl.clipping.modes import parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import every_pair
from tests.impl.ways import WAYS, integers

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

X = integers(4, 3, seed=20)
RANKS = {"1": 1, "3": 3, "8": 8, "2 x 2": 4}
"""Number of ranks; "2 x 2" are two replicas of two shards. Of eight ranks four have no sample."""


class Calls(nn.Module):
    """Layers a and b, and any forward with them."""

    def __init__(self, forward: Callable[[nn.Module, nn.Module, Tensor], Tensor], a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.told, self.a, self.b = forward, a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self.a, self.b, x)


def linear(inputs: int = 3, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def half_frozen() -> nn.Module:
    found = linear()
    found.get_parameter("0.weight").requires_grad_(False)
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a unit that runs twice": (lambda: Calls(lambda a, b, x: b(a(a(x))), linear(), linear()), ["a"]),
    "units in a unit": (
        lambda: nn.Sequential(nn.Sequential(linear(), linear()), nn.Linear(3, 2)),
        ["0", "0.0", "0.1"],
    ),
    "a frozen unit": (lambda: nn.Sequential(linear(), frozen(linear()), linear()), ["0", "1", "2"]),
    "the first one frozen": (lambda: nn.Sequential(frozen(linear()), linear()), ["0", "1"]),
    "half of each frozen": (lambda: nn.Sequential(half_frozen(), half_frozen()), ["0", "1"]),
    "a unit that is recomputed": (
        lambda: Calls(lambda a, b, x: b(checkpoint(a, x, use_reentrant=False)), linear(), linear()),
        ["a", "b"],
    ),
    "a unit that never runs": (lambda: Calls(lambda a, b, x: a(x), linear(), linear()), ["a", "b"]),
    "one row": (lambda: nn.Sequential(linear(3, 1), nn.Linear(1, 1)), ["0"]),
    "no unit": (lambda: nn.Linear(3, 3), []),
}


def made(kind: str) -> nn.Module:
    built = MODELS[kind][0]().double()
    for seed, parameter in enumerate(built.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed, bound=1)
    return built


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(1)


def alone(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared norms [4], and gradients of the sum, one sample at a time."""
    module, squared = made(kind), []
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for i in range(len(X)):
        found = torch.autograd.grad(loss(module(X[i : i + 1]), X).sum(), list(named.values()), allow_unused=True)
        used = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
        squared.append(sum(float(gradient.square().sum()) for gradient in used.values()))
        for name, gradient in used.items():
            total[name] += gradient
    return torch.tensor(squared, dtype=torch.float64), total


def sharded(way: str, layout: str, module: nn.Module, units: list[str], reshard: bool) -> Sharded:
    if layout != "2 x 2":
        return WAYS[way](module, units, reshard)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if way == "per-parameter":
        return PerParameterModel(module, units, mesh, reshard)
    shard, replicate = (collectives.axis(mesh.get_group(name)) for name in ("shard", "replicate"))
    return ShardedModel(module, units, shard, reshard, replicate)


MODES = [
    ("ghost", "immediate", True),
    ("flash", "deferred", False),
    ("ghost_bk", "deferred", True),
    ("flash_bk", "immediate", False),
]


@every_pair({"kind": MODELS, "mode, timing, reshard": MODES, "layout": RANKS, "way": WAYS})
def test_two_private_steps_equal_the_single_device(
    ranks: Ranks, kind: str, way: str, layout: str, mode: str, timing: str, reshard: bool
) -> None:
    squared, total = alone(kind)
    world_size = RANKS[layout]
    privacy = Privacy(Flat(2.0**60), parse(mode, timing))  # type: ignore[arg-type]

    def body(rank: int) -> tuple[Tensor, list[int], dict[str, Tensor]]:
        trainer = Trainer(
            sharded(way, layout, made(kind), MODELS[kind][1], reshard),
            lambda y, t: loss(y, t) * world_size,
            lambda parameters: torch.optim.SGD(parameters, lr=0.0, foreach=False),
            Options(normaliser=1, privacy=privacy),
        )
        rows = [row for row in range(4) if row % world_size == rank]
        for _ in range(2):
            trainer.step([MicroBatch(X[rows], X[rows], rows)])
        return torch.cat(trainer.found.norms), rows, trainer.model.full_gradients()

    for norms, rows, gradients in ranks(body, world_size):
        assert torch.equal(norms, (squared[rows] * world_size**2).sqrt())
        assert gradients.keys() == total.keys()
        assert all(torch.equal(gradients[name], gradient * world_size) for name, gradient in total.items())
