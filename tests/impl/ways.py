"""The two ways of sharding, and small exact data, for tests of what runs on both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded


def flat(module: nn.Module, units: Sequence[str], reshard: bool, **more: Any) -> Sharded:
    """Flat buffers over all ranks."""
    return ShardedModel(module, units, collectives.axis(), reshard, **more)


def per_parameter(module: nn.Module, units: Sequence[str], reshard: bool, **more: Any) -> Sharded:
    """``fully_shard`` over all ranks."""
    return PerParameterModel(module, units, init_device_mesh("cpu", (collectives.axis().size,)), reshard, **more)


WAYS: dict[str, Callable[..., Sharded]] = {"flat": flat, "per-parameter": per_parameter}


def integers(*shape: int, seed: int, bound: int = 2) -> Tensor:
    """Integers in [-bound, bound], float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=generator).double()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Dyadic constants, one tensor at a time."""
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.5, weight_decay=0.5, foreach=False)
