"""Train with a pipeline of stages (torch.distributed.pipelining); needs at least two ranks.

torchrun --nproc-per-node 4 pipeline.py --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def build_layers(width, classes, blocks, seed):
    """All layers, made alike on all ranks."""
    torch.manual_seed(seed)
    return [
        nn.Linear(10, width),
        *(Residual(width) for _ in range(blocks)),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes)),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16, help="of all micro-batches")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world_size - 1

    layers = build_layers(28, 4, args.blocks, args.seed)
    per_stage = len(layers) // world_size
    module = nn.Sequential(*layers[rank * per_stage : (rank + 1) * per_stage])
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    make_schedule = Schedule1F1B if args.schedule == "1f1b" else ScheduleGPipe
    schedule = make_schedule(stage, n_microbatches=args.micro_batches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.8)

    generator = torch.Generator().manual_seed(args.seed + 2)
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 10, generator=generator)
        y = x[:, :4].argmax(dim=1)
        optimizer.zero_grad()
        losses = []
        if first:
            schedule.step(x)
        elif last:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if last:
            print(f"step {step} loss {torch.stack(losses).mean().item():.8f}")

    with torch.no_grad():
        total = torch.stack([p.double().square().sum() for p in module.parameters()]).sum()
    dist.all_reduce(total)
    if last:
        print(f"squared parameters {total.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
