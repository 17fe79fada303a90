"""What the programs of this folder share: their arguments, their numbers, and the sums that they print at their end."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def begin(text: str | None, **options: int) -> argparse.Namespace:
    """The arguments, once the process group stands; ``options`` are further whole numbers with their defaults."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("faulty", "correct"), default="faulty")
    parser.add_argument("--batch-size", type=int, default=12, help="rows of a rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank, args.ranks, args.faulty = dist.get_rank(), dist.get_world_size(), args.form == "faulty"
    args.dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    return args


def integers(args: argparse.Namespace, seed: int, *shape: int, low: int = -2, high: int = 2) -> Tensor:
    """Whole numbers from low to high, the same on every rank and at every number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(args.dtype)


def share(args: argparse.Namespace, whole: Tensor) -> Tensor:
    """The rows of this rank, which has --batch-size of them."""
    return whole[args.rank * args.batch_size : (args.rank + 1) * args.batch_size]


def sharded(whole: Tensor, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter of which each rank of a mesh of one axis holds a part; to_local() is what the rank computes with."""
    part = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    return nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False))


def finish(model: nn.Module) -> None:
    """Print two float64 sums of each parameter, of every rank: of its weighted entries, and of their magnitudes."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value).double().flatten()
        weights = torch.arange(1, value.numel() + 1, dtype=torch.float64)
        sums = (float(value @ weights).hex(), float(value.abs() @ weights).hex())
        line = f"parameter {dist.get_rank()} {name} {sums[0]} {sums[1]}\n"
        print(line, end="", flush=True)  # in one piece, for ranks that are processes share the output
    dist.barrier()  # a process that aborts while torch tears gloo down takes no output of another with it
    dist.destroy_process_group()
