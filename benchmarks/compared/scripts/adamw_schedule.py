"""Train with AdamW parameter groups, a warmup and cosine schedule, and an exponential moving average of weights.

torchrun --nproc-per-node 4 adamw_schedule.py --batch-size 6 --steps 6
"""

import argparse
import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Mixer(nn.Module):
    def __init__(self, tokens=6, width=24):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.norm1 = nn.LayerNorm(width)
        self.across = nn.Linear(tokens, tokens)
        self.norm2 = nn.LayerNorm(width)
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.across(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.within(self.norm2(h))
        return self.head(h.mean(dim=1))


def parameter_groups(model, weight_decay):
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "norm" in name:
            no_decay.append(parameter)
        else:
            decay.append(parameter)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


def warmup_cosine(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@torch.no_grad()
def update_ema(ema, model, decay):
    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(parameter, 1 - decay)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--ema-decay", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    global_batch_size = args.batch_size * world_size

    torch.manual_seed(args.seed)
    model = Mixer()
    ema = copy.deepcopy(model)
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, 2, args.steps))

    generator = torch.Generator().manual_seed(args.seed + 7)
    samples = torch.randn(args.steps * global_batch_size + 40, 6, 5, generator=generator)
    labels = samples.mean(dim=(1, 2)).mul(12).round().long() % 3

    for step in range(args.steps):
        first = step * global_batch_size + rank * args.batch_size
        x = samples[first : first + args.batch_size]
        y = labels[first : first + args.batch_size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        update_ema(ema, model, args.ema_decay)

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world_size:.8f} lr {scheduler.get_last_lr()[0]:.6f}")

    with torch.no_grad():
        plain = nn.functional.cross_entropy(model(samples[-40:]), labels[-40:])
        averaged = nn.functional.cross_entropy(ema(samples[-40:]), labels[-40:])
    if rank == 0:
        print(f"final evaluation loss {plain.item():.8f} averaged weights {averaged.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
