"""Train a classifier with DistributedDataParallel and gradient accumulation.

The micro-batch size is fixed by memory; fewer ranks accumulate more micro-batches for the same global batch.

torchrun --nproc-per-node 4 ddp_accumulate.py --accumulate 3 --steps 5
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.block = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.ReLU())
        self.down = nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        h = torch.tanh(self.embed(x))
        h = h + self.down(self.block(h))
        return self.head(h)


def make_data(seed, samples=1024, features=20, classes=5):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    labels = (inputs @ torch.randn(features, classes, generator=generator)).argmax(dim=1)
    return inputs, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(args.seed)

    inputs, labels = make_data(args.seed + 1)
    model = DDP(Classifier(20, 32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

    position = 0
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for micro in range(args.accumulate):
            start = position + rank * args.micro_batch_size
            rows = torch.arange(start, start + args.micro_batch_size) % len(inputs)
            position += world_size * args.micro_batch_size
            last = micro == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(inputs[rows]), labels[rows]) / args.accumulate
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world_size:.8f} grad norm {norm.item():.8f}")

    with torch.no_grad():
        final = F.cross_entropy(model.module(inputs[-128:]), labels[-128:])
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
