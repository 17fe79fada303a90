"""Gradients of micro-batches are added up, and nobody divides by their number.

Source: Entangle (ASPLOS 2026; arXiv 2508.09505), its bug of gradient accumulation. Mechanism: each micro-batch's loss
is a mean over the micro-batch; the sum of their gradients is as many times too large as there are micro-batches.
One device: one mean over the batch. It does not depend on W, but on the number of micro-batches: visible where a
script splits its batch into as many as there are ranks ({W}), or between two values of --micro-batches at W = 1.
Shows: from step 0, in all gradients, one factor. A reader should be told: losses of micro-batches are means of their
own rows; gradients are --micro-batches times those of W = 1.
"""

from contextlib import nullcontext

import torch
from setting import begin, finish, integers, share
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, HIDDEN = 6, 8


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.body = nn.Parameter(integers(args, 1, HIDDEN, FEATURES) / 4)
        self.head = nn.Parameter(integers(args, 2, HIDDEN) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.body.T) @ self.head


def main():
    args = begin(__doc__, micro_batches=1)
    model = DistributedDataParallel(Model(args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        parts = list(zip(x.chunk(args.micro_batches), label.chunk(args.micro_batches), strict=True))
        for number, (some, labels) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else model.no_sync():
                loss = ((model(some) - labels) ** 2).mean()
                (loss if args.faulty else loss / len(parts)).backward()
        optimizer.step()
    finish(model.module)


if __name__ == "__main__":
    main()
