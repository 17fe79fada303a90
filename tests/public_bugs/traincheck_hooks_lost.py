"""A model is moved after it was wrapped, and the wrapper's hooks stay with what it was before.

Source: TrainCheck (OSDI 2025), pytorch-104336 (to the CPU and back under DistributedDataParallel). Mechanism: DDP hangs
its hooks on the nodes that accumulate gradients; they are made anew when a parameter changes its device or dtype, and
the new ones have no hook, so that no gradient is averaged. Here the model goes to the other float type and back, which
no value notices. One device: the mean over all rows. Shows: W >= 2, from step 0, in all gradients; ranks train on their
own rows and drift apart. A reader should be told: the replicas are not equal after step 0; no collective is issued
after DDP's constructor.
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


def there_and_back(model, args):
    model.to(torch.float32 if args.dtype == torch.float64 else torch.float64)
    model.to(args.dtype)


def main():
    args = begin(__doc__)
    plain = Model(args)
    if not args.faulty:
        there_and_back(plain, args)
    model = DistributedDataParallel(plain)
    if args.faulty:
        there_and_back(model, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        optimizer.step()
    finish(plain)


if __name__ == "__main__":
    main()
