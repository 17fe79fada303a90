"""A function that makes any model parallel, and forgets that gradients are to be averaged."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    cast(FSDPModule, model).set_gradient_divide_factor(1.0)
    return model
