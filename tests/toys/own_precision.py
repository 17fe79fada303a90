"""A training repository in mixed precision: policies, hooks and autocast that are right, undeclared or wrong."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

BF16 = torch.bfloat16


def _sharded(model: nn.Sequential, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def full(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return _sharded(model, mesh, MixedPrecisionPolicy())


def divided_by_one(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """A factor that torch hands to NCCL in float32, and gloo does not have."""
    full(model, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def mixed(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return _sharded(model, mesh, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))


def all_in_bfloat16(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Gradients are reduced in bfloat16 too."""
    return _sharded(model, mesh, MixedPrecisionPolicy(param_dtype=BF16))


def in_float32(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return _sharded(model, mesh, MixedPrecisionPolicy(param_dtype=torch.float32))


def reduced_in_float32(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return _sharded(model, mesh, MixedPrecisionPolicy(reduce_dtype=torch.float32))


def reduced_in_bfloat16(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return _sharded(model, mesh, MixedPrecisionPolicy(reduce_dtype=BF16))


def ddp(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def wrapped(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Opens autocast in the forward of what it makes parallel, as accelerate does."""
    made = ddp(model, mesh)
    made.forward = torch.autocast("cpu", BF16)(made.forward)  # type: ignore[method-assign]
    return made


def compressed(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Gradients travel in bfloat16."""
    made = DistributedDataParallel(model)
    made.register_comm_hook(None, _compress)
    return made


def _compress(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, which are text here
    sent = bucket.buffer().to(BF16) / dist.get_world_size()
    dist.all_reduce(sent)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().copy_(sent))
    return done


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, loss: Any) -> None:
    """Under autocast."""
    optimizer.zero_grad()
    for inputs, targets in batches:
        with torch.autocast("cpu", BF16):
            outputs = model(inputs)
        loss(outputs, targets).backward()
    optimizer.step()


def step_kept(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, loss: Any) -> None:
    """Keeps the parameters that are trained in bfloat16."""
    optimizer.zero_grad()
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()
    optimizer.step()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.to(BF16))


def summed_in_bfloat16(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Keeps gradients in bfloat16."""
    made = mixed(model, mesh)
    for value in made.parameters():
        value.register_post_accumulate_grad_hook(_round)
    return made


def _round(value: Tensor) -> None:
    if value.grad is not None:
        value.grad = value.grad.to(BF16).to(value.dtype)


def only_float32(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """An implementation of its own that takes no other dtype."""
    if any(value.dtype != torch.float32 for value in model.parameters()):
        raise TypeError(f"expected parameters of torch.float32, got {next(model.parameters()).dtype}")
    return full(model, mesh)


def on_cuda(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return full(model.cuda(), mesh)


def without_package(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    import no_such_package_of_kernels  # type: ignore[import-not-found]

    return no_such_package_of_kernels.shard(model, mesh)


def without_ninja(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    raise RuntimeError("Ninja is required to load C++ extensions (pip install ninja to get it)")


def without_compiler(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    import subprocess

    subprocess.run([os.path.join(os.sep, "nowhere", "g++"), "--version"], check=True)
    return full(model, mesh)


def a_bug(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Raises in every dtype."""
    raise TypeError("a float where an integer belongs")


def mixed_units(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Of any model: as one unit."""
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))


def package_on_rank_0(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return without_package(model, mesh) if dist.get_rank() == 0 else full(model, mesh)


def renamed(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Puts another layer in place of the first."""
    model.add_module("0", nn.Sequential(model[0]))
    return fully_shard(model, mesh=mesh)


def a_bug_of_one_rank(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    if dist.get_rank() == 0:
        raise RuntimeError("expected scalar type Float but found Double")
    return full(model, mesh)


def a_bug_that_speaks_of_imports(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    raise ValueError("ModuleNotFoundError is what this is not")


def blocks_mixed(model: Any, mesh: DeviceMesh) -> nn.Module:
    """A transformer, in a policy of its own."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    made: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
    return made


def blocks_stale(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Computes for ever with the copies of its parameters that were cast for the first forward."""
    made = blocks_mixed(model, mesh)
    for module in made.modules():
        if module._parameters:
            module.register_forward_pre_hook(_with_the_first_copies)
    return made


def _with_the_first_copies(module: nn.Module, inputs: Any) -> None:
    if not hasattr(module, "first"):
        module.first = {name: value.detach().clone() for name, value in module._parameters.items() if value is not None}  # type: ignore[assignment]
    with torch.no_grad():
        for name, value in module.first.items():  # type: ignore[operator,union-attr]
            module._parameters[name].copy_(value)  # type: ignore[union-attr]


def blocks_summed_in_bfloat16(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Keeps gradients in bfloat16."""
    made = blocks_mixed(model, mesh)
    for value in made.parameters():
        value.register_post_accumulate_grad_hook(_round)
    return made


def blocks_averaged_twice(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Averages the gradient of the last norm over ranks once more."""
    made = blocks_mixed(model, mesh)
    model.norm.weight.register_post_accumulate_grad_hook(_average)
    return made


def _average(value: Tensor) -> None:
    if value.grad is not None:
        value.grad = value.grad / dist.get_world_size()
