"""Train with autocast in half precision and a gradient scaler, clipping unscaled gradients.

torchrun --nproc-per-node 4 grad_scaler.py --batch-size 4 --steps 6
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=0.7)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    generator = torch.Generator().manual_seed(args.seed + 4)
    data = torch.randn(args.steps + 1, args.batch_size * world_size, 9, generator=generator)
    targets = torch.stack([data.norm(dim=-1), data.sum(dim=-1)], dim=-1)

    for step in range(args.steps):
        rows = slice(rank * args.batch_size, (rank + 1) * args.batch_size)
        x, y = data[step, rows], targets[step, rows]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=getattr(torch, args.dtype)):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            mean, scale = shown.item() / world_size, scaler.get_scale()
            print(f"step {step} loss {mean:.6f} norm {norm.item():.6f} scale {scale:.0f}")

    with torch.no_grad():
        final = nn.functional.mse_loss(model.module(data[-1]), targets[-1])
    if rank == 0:
        print(f"final evaluation loss {final.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
