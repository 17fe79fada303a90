"""A small training repository: a model, its data, and functions that shard it, step and clip, right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def in_one(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """All layers are gathered at once."""
    return fully_shard(model, mesh=mesh)


def in_place(model: nn.Sequential, mesh: DeviceMesh) -> None:
    parallelize(model, mesh)


def summing(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """As where a loss is divided by the tokens of all ranks: gradients are added up, and nothing is divided."""
    parallelize(model, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def one_unit_averaged(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """The last layer's gradient is divided, and nobody multiplies it again."""
    cast(FSDPModule, summing(model, mesh)[4]).set_gradient_divide_factor(float(mesh.size()))  # type: ignore[index]
    return model


def ddp(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def on_two_axes(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return parallelize(model, mesh["dp_shard"])


def in_halves(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Right on numbers of ranks that divide the width of 8."""
    if "tp" not in (mesh.mesh_dim_names or ()):
        return model
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def nothing(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Forgets to make it parallel."""


def a_list(model: nn.Sequential, mesh: DeviceMesh) -> list[nn.Module]:
    return [model]


def bias_left_out(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Nobody averages the gradient of what is not sharded."""
    fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, loss: Loss) -> None:
    optimizer.zero_grad()
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()
    optimizer.step()


def syncs_once(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, loss: Loss) -> None:
    """As trainings over fully_shard do: the gradients are reduced behind the last micro-batch."""
    assert isinstance(model, nn.Sequential)  # what parallelize gave, with nothing around it
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(batches, 1):
        model.set_requires_gradient_sync(number == len(batches))  # type: ignore[operator]
        outputs = model(inputs)
        loss(outputs.reshape(-1), targets).backward()  # in whatever shape the step has it by then
    optimizer.step()


def never_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, loss: Loss) -> None:
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()


def last_only(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, loss: Loss) -> None:
    """Clears the gradients of earlier micro-batches."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
    optimizer.step()


def clip(model: nn.Module, max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clip_own_shard(model: nn.Module, max_norm: float) -> Tensor:
    """Each rank clips by the norm of its own shard."""
    gradients = [value.grad.to_local() for value in model.parameters() if value.grad is not None]
    total = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= (max_norm / (total + 1e-6)).clamp(max=1.0)
    return total


def clip_silently(model: nn.Module, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
