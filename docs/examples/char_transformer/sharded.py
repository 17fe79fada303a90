"""Fully sharded data parallelism from scratch: of each unit a rank keeps 1/W, and gathers the rest while it is used.

A unit is a module whose parameters are one flat buffer, padded to a multiple of W. Its forward gathers the buffer and
frees it; its backward gathers it again, and reduce-scatters the gradient as soon as it is whole. What no unit holds is
the root, which stays gathered from its forward to the end of its backward.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Unit:
    """Parameters as one flat buffer. ``shard``: this rank's part of it, which the optimizer trains.

    ``places``: (module, name in it, name in the whole model) of each use of a parameter.
    """

    def __init__(self, places):
        self.places, self.ranks = places, dist.get_world_size()
        found = {id(getattr(module, local)): (name, getattr(module, local)) for module, local, name in reversed(places)}
        self.shapes = {name: value.shape for name, value in found.values()}
        self.uses = [(module, local, found[id(getattr(module, local))][0]) for module, local, _ in places]
        flat = torch.cat([value.detach().flatten() for _, value in found.values()])
        self.padding = -len(flat) % self.ranks
        flat = torch.cat([flat, flat.new_zeros(self.padding)])
        self.shard = nn.Parameter(flat.chunk(self.ranks)[dist.get_rank()].clone())
        self.full = None
        for module, local, _ in places:
            del module._parameters[local]

    def gather(self):
        """Let modules use whole parameters."""
        self.forget()
        self.full = self.shard.new_empty(len(self.shard) * self.ranks)
        self.fill()
        if torch.is_grad_enabled():
            self.full.requires_grad_()
            self.full.register_post_accumulate_grad_hook(self.reduce)
        values = self.values(self.full)
        for module, local, name in self.uses:
            setattr(module, local, values[name])

    def fill(self):
        """Put every rank's part into the buffer, which autograd takes for the one that it knows."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        dist.all_gather_into_tensor(self.full.data, self.shard.data)

    def free(self):
        """Give the memory back; what autograd has saved of it is filled again before the backward reads it."""
        self.full.untyped_storage().resize_(0)

    def forget(self):
        """Begin anew."""
        self.full = None
        for module, local, _ in self.places:
            vars(module).pop(local, None)

    def reduce(self, full):
        """The mean of the ranks' gradients, this rank's part of it."""
        mean = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(mean, full.grad)
        mean /= self.ranks
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.forget()

    def values(self, flat):
        """Name -> view of a whole buffer."""
        parts = flat[: len(flat) - self.padding].split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def whole(self, shard):
        """Name -> values, of what ranks have as shards."""
        flat = shard.new_empty(len(shard) * self.ranks)
        dist.all_gather_into_tensor(flat, shard.detach())
        return self.values(flat)


class Sharded(nn.Module):
    """``model``, of which each of ``blocks`` (names of modules) is a unit. Sharded in place."""

    def __init__(self, model, blocks):
        super().__init__()
        self.model, self.units = model, []
        places = [
            (module, local, f"{prefix}.{local}".lstrip("."))
            for prefix, module in model.named_modules()
            for local, _ in module.named_parameters(recurse=False)
        ]
        owners = {}
        for module, local, name in places:
            block = next((block for block in blocks if name.startswith(f"{block}.")), "the root")
            if owners.setdefault(id(getattr(module, local)), block) != block:
                raise ValueError(f"{name} is used in two units, so it would be two weights: make one unit of both")
        for block in blocks:
            self.units.append(Unit([place for place in places if place[2].startswith(f"{block}.")]))
            places = [place for place in places if not place[2].startswith(f"{block}.")]
            module = model.get_submodule(block)
            module.register_forward_pre_hook(lambda module, inputs, unit=self.units[-1]: unit.gather())
            module.register_forward_hook(lambda module, inputs, output, unit=self.units[-1]: _used(unit, output))
        self.root = Unit(places) if places else None
        if self.root is not None:
            self.units.append(self.root)

    def forward(self, *inputs):
        if self.root is not None:
            self.root.gather()
        outputs = self.model(*inputs)
        if self.root is not None and not torch.is_grad_enabled():
            self.root.forget()
        return outputs

    def shards(self):
        """What the optimizer trains."""
        return [unit.shard for unit in self.units]

    def clip(self, limit):
        """Clip by the norm of the whole gradient, and return it."""
        squares = torch.stack([unit.shard.grad.square().sum() for unit in self.units]).sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        for unit in self.units:
            unit.shard.grad *= torch.clamp(limit / (norm + 1e-6), max=1.0)
        return norm

    def whole(self):
        """Name -> values of each parameter, on every rank."""
        return {name: value for unit in self.units for name, value in unit.whole(unit.shard).items()}

    def gradients(self):
        """Name -> mean gradient of each parameter, on every rank."""
        return {name: value for unit in self.units for name, value in unit.whole(unit.shard.grad).items()}


def _used(unit, output: Tensor):
    """After a unit's forward. Its backward begins where the gradient of its output is known."""
    if torch.is_grad_enabled() and output.requires_grad:
        unit.free()
        output.register_hook(lambda gradient: unit.fill())
    else:
        unit.forget()


def save(folder, sharded, optimizer):
    """Each rank's shards and moments, in a file of its own."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = {"shards": sharded.shards(), "optimizer": optimizer.state_dict()}
    torch.save(state, Path(folder) / f"rank{dist.get_rank()}.pt")
    dist.barrier()


def load(folder, sharded, optimizer):
    """What as many ranks have saved."""
    state = torch.load(Path(folder) / f"rank{dist.get_rank()}.pt")
    for shard, saved in zip(sharded.shards(), state["shards"], strict=True):
        shard.data.copy_(saved.data)
    optimizer.load_state_dict(state["optimizer"])
