"""Checkpoints that a training repository saves and loads, right or wrong; the model and the rest as in own_parts.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Optimizer = torch.optim.Optimizer
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def ddp(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def save(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """By torch.distributed.checkpoint, each rank its own part."""
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)


def load(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    _load(model, optimizer, folder)


def _load(
    model: nn.Module, optimizer: Optimizer, folder: str, change: Callable[[dict[str, Any]], object] = lambda state: None
) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    change(state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def read(model: nn.Module, folder: str) -> None:
    """As whoever exports a model: in one process."""
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])


def read_no_last(model: nn.Module, folder: str) -> None:
    """The last tensor keeps what the new model has."""
    state = model.state_dict()
    last = list(state)[-1]
    dcp.load(
        {"model": {name: value for name, value in state.items() if name != last}}, checkpoint_id=folder, no_dist=True
    )
    model.load_state_dict(state)


def read_no_file(model: nn.Module, folder: str) -> None:
    model.load_state_dict(torch.load(Path(folder) / "model.pt"))


def save_whole(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """By torch.save on rank 0, whole tensors."""
    state = get_state_dict(model, optimizer, options=_WHOLE)
    if dist.get_rank() == 0:
        torch.save(state, Path(folder) / "all.pt")


def load_whole(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    models, optimizers = torch.load(Path(folder) / "all.pt")
    set_model_state_dict(model, models, options=_WHOLE)
    _load_whole_optimizer(model, optimizer, optimizers)


def _load_whole_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """torch refuses what holds no tensor, as of SGD without momentum."""
    if state["state"]:
        set_optimizer_state_dict(model, optimizer, state, options=_WHOLE)
    else:
        for group, kept in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group["lr"] = kept["lr"]


def save_by_rank(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """A file for each rank, which the same number of ranks reads."""
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder) / f"{dist.get_rank()}.pt")


def load_by_rank(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    if len(list(Path(folder).iterdir())) != dist.get_world_size():
        raise NotImplementedError("a checkpoint is read by as many ranks as wrote it")
    models, optimizers = torch.load(Path(folder) / f"{dist.get_rank()}.pt", weights_only=False)
    model.load_state_dict(models)
    optimizer.load_state_dict(optimizers)


def load_no_optimizer(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    state = {"model": get_state_dict(model, optimizer)[0]}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])


def load_no_counter(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """The optimizer counts its steps from 0 again."""
    _load(model, optimizer, folder)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def load_no_rate(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """The learning rate is that of the first step again."""
    rates = [group["lr"] for group in optimizer.param_groups]
    _load(model, optimizer, folder)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def save_moments_of_rank_0(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """What the optimizer keeps is saved by rank 0 alone, as it lies there."""
    save(model, optimizer, folder)
    if dist.get_rank() == 0:
        torch.save([_local(state) for state in optimizer.state.values()], f"{folder}/moments.pt")


def load_moments_of_rank_0(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """Every rank goes on with the moments of rank 0."""
    _load(model, optimizer, folder)
    for state, kept in zip(optimizer.state.values(), torch.load(f"{folder}/moments.pt"), strict=True):
        for name, value in _local(state).items():
            value.flatten()[: kept[name].numel()] = kept[name].flatten()[: value.numel()]


def _local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}


def save_own_shard(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    """Rank 0 saves what it holds of each parameter, and forgets to gather it."""
    _, optimizers = get_state_dict(model, optimizer, options=_WHOLE)
    if dist.get_rank() == 0:
        torch.save(([_local({"": value})[""].detach() for value in model.parameters()], optimizers), f"{folder}/0.pt")


def load_own_shard(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    shards, optimizers = torch.load(f"{folder}/0.pt")
    _load_whole_optimizer(model, optimizer, optimizers)
    for value, kept in zip(model.parameters(), shards, strict=True):
        shard = _local({"": value.detach()})[""]
        shard.flatten()[: kept.numel()] = kept.flatten()[: shard.numel()]
