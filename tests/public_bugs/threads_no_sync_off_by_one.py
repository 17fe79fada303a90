"""The micro-batch whose backward averages gradients is the first instead of the last.

Source: modelscope/FunASR pull request 3472, proved there by a script on two gloo ranks (4.0 and 7.0 for 5.5).
Mechanism: `number % accumulate` decides which micro-batch is under no_sync(); numbers start at 0, so the first one is
averaged and the ranks' own gradients of the others are added to it. One device: the sum of all. Shows: W >= 2 with two
micro-batches or more, from step 0, in all gradients; ranks drift apart. A reader should be told: the replicas are not
equal after step 0; the all_reduce of a step is issued before its last backward.
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
    args = begin(__doc__, accumulate=2)
    model = DistributedDataParallel(Model(args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        for number, (some, labels) in enumerate(
            zip(x.tensor_split(args.accumulate), label.tensor_split(args.accumulate), strict=True)
        ):
            averaged = number % args.accumulate == 0 if args.faulty else (number + 1) % args.accumulate == 0
            with nullcontext() if averaged else model.no_sync():
                (((model(some) - labels) ** 2).sum() / args.batch_size).backward()
        optimizer.step()
    finish(model.module)


if __name__ == "__main__":
    main()
