"""A small network on exact integers, its single-device answer, and a private step of it on ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.impl.ways import WAYS, integers, sgd

BOOKKEEPING = Mode(passes="bookkeeping")
SIZES = {1: [4], 2: [3, 1], 3: [2, 0, 2]}


def network() -> nn.Sequential:
    built = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 2))).double()
    for seed, parameter in enumerate(built.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    return built


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


X, Y = integers(4, 3, seed=20), integers(4, 2, seed=21)


def per_sample(module: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Each sample's gradients, by plain autograd."""
    found = []
    for i in range(len(x)):
        module.zero_grad()
        loss(module(x[i : i + 1]), y[i : i + 1]).sum().backward()  # type: ignore[no-untyped-call]
        found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    return found


def stepped(way: str, rank: int, world_size: int, privacy: Privacy, x: Tensor, profile: Any = None) -> Trainer:
    """A trainer after one step with N = W, so that a sample weighs 1 and average times W is the sum."""
    start = sum(SIZES[world_size][:rank])
    rows = list(range(start, start + SIZES[world_size][rank]))
    options = Options(normaliser=world_size, privacy=privacy)
    more = {} if profile is None else {"profile": profile}
    trainer = Trainer(WAYS[way](network(), ["0", "1"], True), loss, sgd, options, **more)
    trainer.step([MicroBatch(x[rows], Y[rows], rows)])
    return trainer


def squared_norm(gradients: dict[str, Tensor], prefix: str) -> float:
    """Squared norm over the parameters whose names begin so."""
    return sum(float(g.square().sum()) for name, g in gradients.items() if name.startswith(prefix))
