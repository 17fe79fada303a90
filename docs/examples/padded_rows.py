"""Training on rows of different lengths, with a mistake that shows on several ranks only.

$ fsdpcheck compare 'docs/examples/padded_rows.py --batch-size {12//W}'
$ fsdpcheck compare 'docs/examples/padded_rows.py --batch-size {12//W} --all-tokens'

Each rank divides its loss by its own number of tokens, and DistributedDataParallel averages the gradients: a token of
a rank with few tokens counts more than one of a rank with many. With ``--all-tokens`` the loss is divided by the
tokens of all ranks.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--all-tokens", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

rows = torch.randint(11, (48, 9), generator=torch.Generator().manual_seed(1))
lengths = torch.randint(2, 10, (48,), generator=torch.Generator().manual_seed(2))
labels = torch.where(torch.arange(9) < lengths[:, None], rows.roll(-1, dims=1), -100)
for step in range(args.steps):
    first = (step * world + rank) * args.batch_size % len(rows)
    mine = slice(first, first + args.batch_size)
    tokens = (labels[mine] >= 0).sum()
    if args.all_tokens:
        dist.all_reduce(tokens)
        tokens = tokens / world  # gradients are averaged over ranks
    scores = model(rows[mine]).transpose(1, 2)
    loss = nn.functional.cross_entropy(scores, labels[mine], ignore_index=-100, reduction="sum") / tokens
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
