"""Train a small MLP regressor with DistributedDataParallel.

torchrun --nproc-per-node 4 ddp_mlp.py --batch-size 6 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_data(seed, samples=512):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 16, generator=generator)
    mixing = torch.randn(16, 4, generator=generator)
    targets = torch.tanh(inputs @ mixing) + 0.1 * torch.randn(samples, 4, generator=generator)
    return inputs, targets


def make_model():
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 4),
    )


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    inputs, targets = make_data(args.seed + 1)
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for step in range(args.steps):
        start = step * args.batch_size * world_size + rank * args.batch_size
        rows = slice(start, start + args.batch_size)
        loss = F.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        mean_loss /= world_size
        if rank == 0:
            print(f"step {step} loss {mean_loss.item():.8f}")

    with torch.no_grad():
        final = F.mse_loss(model.module(inputs[-64:]), targets[-64:])
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
