"""Experts are left out where gradients are added up, and their own reduction never comes.

Source: Entangle (ASPLOS 2026; arXiv 2508.09505), a missing all-reduce of experts. Mechanism: experts are marked for a
reduction over the expert-data-parallel group; the loop adds up everything that is not marked, and no second loop adds
up the marked. One device: all rows. Shows: W >= 2, from step 0, in the gradients of `experts`, whose copies on ranks
drift apart. A reader should be told: the replicas of `experts` are not equal after step 0; the gradients of ranks add
up to that of W = 1.
"""

import torch
from regions import add_up
from setting import begin, finish, integers, share
from torch import nn

FEATURES, EXPERTS = 8, 4


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.router = nn.Parameter(integers(args, 1, EXPERTS, FEATURES) / 4)
        self.experts = nn.Parameter(integers(args, 2, EXPERTS, FEATURES) / 4)

    def forward(self, x):
        return (torch.softmax(x @ self.router.T, -1) * torch.tanh(x @ self.experts.T)).sum(-1)


def main():
    args = begin(__doc__)
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        (((model(x) - label) ** 2).sum() / rows).backward()
        add_up([model.router])
        if not args.faulty:
            add_up([model.experts])  # over the expert-data-parallel group, here all ranks
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
