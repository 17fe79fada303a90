"""Train a convolutional net whose batch norm takes its statistics over all ranks (on CPUs, so written by hand).

torchrun --nproc-per-node 4 conv_syncbn.py --batch-size 4 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SyncBatchNorm2d(nn.BatchNorm2d):
    """nn.SyncBatchNorm wants a GPU; this one sums over ranks with a differentiable all-reduce."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        sums = torch.stack([x.sum(dim=(0, 2, 3)), x.square().sum(dim=(0, 2, 3))])
        sums = dist_fn.all_reduce(sums)
        mean, square = sums / count
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm1 = SyncBatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = SyncBatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)) + x)
        return self.head(x.mean(dim=(2, 3)))


def images_of(generator, count):
    """Stripes: horizontal, vertical or diagonal."""
    kinds = torch.randint(0, 3, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns])[kinds]
    phase = torch.rand(count, 1, 1, generator=generator) * 6
    noise = 0.5 * torch.randn(count, 6, 6, generator=generator)
    return (torch.sin(1.7 * waves + phase) + noise).unsqueeze(1), kinds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    generator = torch.Generator().manual_seed(args.seed + 20)
    for step in range(args.steps):
        images, kinds = images_of(generator, args.batch_size * world_size)
        images, kinds = images[rank::world_size], kinds[rank::world_size]
        loss = nn.functional.cross_entropy(model(images), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world_size:.8f}")

    model.eval()
    images, kinds = images_of(generator, 30)
    with torch.no_grad():
        final = nn.functional.cross_entropy(model.module(images), kinds)
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
