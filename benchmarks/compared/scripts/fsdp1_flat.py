"""Train an autoencoder with FullyShardedDataParallel, flat parameters wrapped by size.

torchrun --nproc-per-node 4 fsdp1_flat.py --batch-size 6 --steps 5
"""

import argparse
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class AutoEncoder(nn.Module):
    def __init__(self, features=18, hidden=37, code=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.ELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ELU(), nn.Linear(hidden, features))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def samples_of(step, count, seed):
    generator = torch.Generator().manual_seed(seed * 7919 + step)
    latent = torch.randn(count, 3, generator=generator)
    angles = torch.arange(18) / 6
    return torch.sin(latent[:, :1] + angles) + latent[:, 1:2] * torch.cos(angles) + 0.3 * latent[:, 2:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = FSDP(
        AutoEncoder(),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=300),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    micro_batch = args.batch_size // args.accumulate
    for step in range(args.steps):
        x = samples_of(step, args.batch_size * world_size, args.seed)
        x = x[rank * args.batch_size : (rank + 1) * args.batch_size]
        optimizer.zero_grad()
        step_loss = 0.0
        for micro in range(args.accumulate):
            part = x[micro * micro_batch : (micro + 1) * micro_batch]
            loss = nn.functional.huber_loss(model(part), part) / args.accumulate
            loss.backward()
            step_loss += loss.item()
        optimizer.step()

        shown = torch.tensor(step_loss)
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world_size:.8f}")

    with torch.no_grad():
        x = samples_of(args.steps, 30, args.seed)
        final = nn.functional.huber_loss(model(x), x)
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
