"""Train on sequences of unequal lengths; the loss is normalised by the number of tokens of the whole step.

torchrun --nproc-per-node 4 token_weighted.py --accumulate 3 --steps 5
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, PAD, IGNORE = 37, 0, -100


class Tagger(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.head(self.norm(x))


def sequence(index, seed, longest=14):
    generator = torch.Generator().manual_seed(seed * 65537 + index)
    length = int(torch.randint(2, longest + 1, (1,), generator=generator))
    start = int(torch.randint(1, VOCAB, (1,), generator=generator))
    ids = (start + 5 * torch.arange(longest + 1)) % (VOCAB - 1) + 1
    ids[length + 1 :] = PAD
    labels = ids[1:].clone()
    labels[length:] = IGNORE
    return ids[:-1], labels


def collate(indices, seed):
    ids, labels = zip(*(sequence(index, seed) for index in indices), strict=True)
    return torch.stack(ids), torch.stack(labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--clip", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    rows_a_step = args.micro_batch_size * args.accumulate * world_size
    for step in range(args.steps):
        micro_batches = []
        for micro in range(args.accumulate):
            first = step * rows_a_step + (micro * world_size + rank) * args.micro_batch_size
            micro_batches.append(collate(range(first, first + args.micro_batch_size), args.seed))
        tokens = torch.stack([(labels != IGNORE).sum() for _, labels in micro_batches]).sum()
        dist.all_reduce(tokens)

        optimizer.zero_grad()
        summed = torch.zeros(())
        for micro, (ids, labels) in enumerate(micro_batches):
            with model.no_sync() if micro < args.accumulate - 1 else nullcontext():
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
                # DDP averages over ranks: undo that, for the sum is divided by all tokens.
                (loss * world_size / tokens).backward()
            summed += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        dist.all_reduce(summed)
        if rank == 0:
            print(f"step {step} loss {(summed / tokens).item():.8f} norm {norm.item():.8f} tokens {tokens.item()}")

    ids, labels = collate(range(10_000, 10_030), args.seed)
    with torch.no_grad():
        final = F.cross_entropy(model.module(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
