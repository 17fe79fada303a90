"""The backward of a gather adds up gradients that every rank already has whole.

Source: NVIDIA/Megatron-LM issue 7452, appendix B 1 (Megatron-Bridge's Wan model; a constant factor, which the type
checker of that thread cannot see). Mechanism: a sequence is gathered at the end and every rank computes the same loss
of the whole; each rank's gradient is complete, and adding the ranks up makes it W times too large. One device: once.
Shows: W >= 2, from step 0, in the gradients of all that stands before the gather. A reader should be told: the gradient
of `body` is W times what it should be, that of `head` agrees. With Adam instead of SGD nothing but the norm would
show it.
"""

import torch
from regions import add_up, gathered, part
from setting import begin, finish, integers
from torch import nn

TOKENS, HIDDEN = 12, 8


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.partial = args.faulty
        self.body = nn.Parameter(integers(args, 1, HIDDEN, HIDDEN) / 4)
        self.head = nn.Parameter(integers(args, 2, HIDDEN) / 4)

    def forward(self, x):
        return gathered(torch.tanh(part(x, 1) @ self.body.T), 1, self.partial) @ self.head


def main():
    args = begin(__doc__)
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN)
        label = integers(args, 20 + step, args.batch_size, TOKENS)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        add_up([model.body])  # of which each rank has seen its tokens
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
