"""Train it: torchrun --nproc-per-node 4 train.py --steps 20"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Transformer, batch
from sharded import Sharded


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Transformer()
    sharded = Sharded(model, [f"blocks.{number}" for number in range(len(model.blocks))])
    optimizer = torch.optim.AdamW(sharded.shards(), lr=1e-2)
    for step in range(options.steps):
        tokens, following = batch(step, options.batch_size, rank, ranks)
        losses = F.cross_entropy(sharded(tokens).flatten(0, 1), following.flatten(), reduction="sum")
        loss = losses / (options.batch_size * following.shape[1]) * ranks  # ranks average; the batch's mean is wanted
        loss.backward()
        norm = sharded.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}, norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
