"""Ranks that hold parts of a sequence divide by their own number of tokens, and are then averaged.

Source: NVIDIA/Megatron-LM issue 7452, finding 9 (pull request 7513). Mechanism: with context parallelism and a token
mask each rank divides its sum of losses by its own count, and the ranks' gradients are averaged as if all counts were
equal. One device: one sum, one count. Shows: W >= 2 where the mask leaves ranks unequal counts, from step 0, in losses
and all gradients. A reader should be told: the loss differs though inputs, labels and counts agree; a mean of means.
"""

import torch
import torch.distributed as dist
from regions import add_up, part
from setting import begin, finish, integers
from torch import nn

TOKENS, HIDDEN = 12, 8


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.body = nn.Parameter(integers(args, 1, HIDDEN, HIDDEN) / 4)
        self.head = nn.Parameter(integers(args, 2, HIDDEN) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.body.T) @ self.head


def main():
    args = begin(__doc__)
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = part(integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN), 1)
        label = part(integers(args, 20 + step, args.batch_size, TOKENS), 1)
        valid = integers(args, 30 + step, args.batch_size, TOKENS, low=0, high=1)
        valid[:, ::3] = 1  # no rank of at most 4 is without a token
        mask = part(valid, 1)
        total = (mask * (model(x) - label) ** 2).sum()
        count = mask.sum()
        if not args.faulty:
            dist.all_reduce(count)
            total = total * args.ranks
        optimizer.zero_grad()
        (total / count).backward()
        add_up(model.parameters())
        for parameter in model.parameters():
            parameter.grad /= args.ranks
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
