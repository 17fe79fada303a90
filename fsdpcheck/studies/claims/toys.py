"""Small exact trainings that many rows measure on: integers in float64, so that equal means equal in every bit.

Legend: B samples in the logical batch, W ranks, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.studies.claims.lab import impl

UNITS = ("0", "1")
SAMPLES = 12
"""B: divided by 1, 2, 3, 4 ranks."""


def integers(*shape: int, seed: int, bound: int = 2) -> Tensor:
    """Integers in [-bound, bound], float64."""
    return torch.randint(-bound, bound + 1, shape, generator=torch.Generator().manual_seed(seed)).double()


def network(inputs: int = 3, hidden: int = 5) -> nn.Sequential:
    """Two units and a root, whose elements most numbers of ranks do not divide."""
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, 3)
    module = nn.Sequential(nn.Sequential(first, nn.ReLU()), nn.Sequential(second, nn.ReLU()), nn.Linear(3, 2)).double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    return module


def data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """(inputs [B, 3], targets [B, 2])."""
    return integers(samples, 3, seed=101), integers(samples, 2, seed=102)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """[B]: half the squared error of each sample."""
    return 0.5 * (outputs - targets).square().flatten(1).sum(1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Dyadic constants, one tensor at a time."""
    return torch.optim.SGD(parameters, lr=2.0**-6, foreach=False)


def squared_norms(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[B], by definition: one backward a sample on a single device, squares of all elements added."""
    found = []
    for one, target in zip(torch.split(x, 1), torch.split(y, 1), strict=True):
        parameters = list(module.parameters())
        gradients = torch.autograd.grad(loss(module(one), target).sum(), parameters)
        found.append(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
    return torch.stack(found)


def flat(module: nn.Module, reshard: bool = True, units: Sequence[str] = UNITS) -> Any:
    """The reference's flat buffers over all ranks."""
    return impl("sharding.flat_model").ShardedModel(module, units, impl("sharding.collectives").axis(), reshard)


def per_parameter(module: nn.Module, reshard: bool = True, units: Sequence[str] = UNITS) -> Any:
    """The reference on ``fully_shard``."""
    mesh = init_device_mesh("cpu", (impl("sharding.collectives").axis().size,))
    return impl("sharding.fsdp2_model").PerParameterModel(module, units, mesh, reshard)


WAYS: dict[str, Callable[..., Any]] = {"flat": flat, "per parameter": per_parameter}


def privacy(clip_norm: float, mode: str = "ghost", timing: str = "immediate", **more: Any) -> Any:
    """Flat clipping at ``clip_norm`` in a mode of the reference, which asks nothing before its first step.

    What is counted and timed is then what every step does.
    """
    rule, chosen = impl("clipping.rules").Flat(clip_norm), impl("clipping.modes").parse(mode, timing)
    return impl("clipping.private_backward").Privacy(rule, chosen, independence="trust", **more)


def trainer(
    model: Any,
    *,
    optimizer: Any = sgd,
    replicated: bool = False,
    notify: Callable[[str], None] = lambda moment: None,
    **more: Any,
) -> Any:
    """The reference's trainer over a sharded model; ``more`` are options of its steps."""
    step, layout = impl("trainer"), impl("clipping.batch_layout")
    options = {"normaliser": SAMPLES, "layout": layout.REPLICATED if replicated else layout.DISTRIBUTED, **more}
    return step.Trainer(model, loss, optimizer, step.Options(**options), notify=notify)


def micro_batches(rows: Sequence[Sequence[int]], samples: int = SAMPLES) -> list[Any]:
    """The micro-batches of a rank that takes these samples."""
    x, y = data(samples)
    return [impl("trainer").MicroBatch(x[list(own)], y[list(own)], list(own)) for own in rows]


def share(rank: int, world_size: int, samples: int = SAMPLES) -> list[int]:
    """Every W-th sample, from the rank's own."""
    return list(range(samples))[rank::world_size]


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> int:
    """How many elements of two sets of parameters differ in some bit."""
    return sum(int((one[name].view(torch.int64) != other[name].view(torch.int64)).sum()) for name in one)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference of two sets of parameters."""
    return max((one[name] - other[name]).abs().max().item() for name in one)
