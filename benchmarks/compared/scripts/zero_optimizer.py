"""Train with DistributedDataParallel and optimizer state sharded by ZeroRedundancyOptimizer.

torchrun --nproc-per-node 4 zero_optimizer.py --batch-size 6 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def build_model(width):
    layers = [nn.Linear(10, width), nn.SiLU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.SiLU()]
    layers += [nn.Linear(width, 1)]
    return nn.Sequential(*layers)


class Waves(torch.utils.data.Dataset):
    """Samples are made from their index alone."""

    def __init__(self, size, seed):
        self.size = size
        self.seed = seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 100_003 + index)
        x = torch.rand(10, generator=generator) * 4 - 2
        return x, torch.sin(x).sum(dim=0, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    dataset = Waves(args.batch_size * world_size * args.steps, args.seed)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = DistributedDataParallel(build_model(args.width))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=args.lr, betas=(0.9, 0.98)
    )
    criterion = nn.SmoothL1Loss()

    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"step {step} loss {mean_loss.item() / world_size:.8f}")

    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        moments = sum(entry["exp_avg_sq"].double().sum() for entry in state.values())
        print(f"second moments {moments.item():.6e}")
    with torch.no_grad():
        x = torch.linspace(-2, 2, 160).view(16, 10)
        final = criterion(model.module(x), torch.sin(x).sum(dim=1, keepdim=True))
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
