"""Train it: torchrun --nproc-per-node 2 train.py --steps 20"""

import argparse

import torch
import torch.distributed as dist
from model import pretrained, records
from private import PrivateTraining
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks")
    parser.add_argument("--records", type=int, default=256)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = PrivateTraining(
        pretrained(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), nn.CrossEntropyLoss(),
        clip_norm=1.0, noise_multiplier=1.0, expected=options.batch_size, rate=options.batch_size / options.records,
        seed=7,
    )  # fmt: skip
    texts, classes = records(options.records)
    draws = torch.Generator().manual_seed(3)  # alike on all ranks, which take their own part of each batch
    for step in range(options.steps):
        chosen = torch.randperm(options.records, generator=draws)[: options.batch_size][rank::ranks]
        loss = torch.tensor(training.step([(texts[chosen], classes[chosen])])) / ranks
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, epsilon {training.accountant.get_epsilon(1e-5):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
