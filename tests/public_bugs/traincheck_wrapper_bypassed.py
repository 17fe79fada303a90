"""The loss is computed with the module inside the wrapper, so the wrapper averages nothing.

Source: TrainCheck (OSDI 2025), x-jxmnop-ddp-out-of-sync (as kohya-ss/sd-scripts issue 924). Mechanism: DDP averages
gradients only of a backward whose forward went through it; this loop calls the module that it wraps. One device: the
mean over all rows. Shows: W >= 2, from step 0, in all gradients; ranks drift apart. A reader should be told: the
replicas are not equal after step 0; the outermost forward is not DDP's, and no collective is issued in backward.
"""

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
    args = begin(__doc__)
    model = DistributedDataParallel(Model(args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        called = model.module if args.faulty else model
        ((called(x) - label) ** 2).mean().backward()
        optimizer.step()
    finish(model.module)


if __name__ == "__main__":
    main()
