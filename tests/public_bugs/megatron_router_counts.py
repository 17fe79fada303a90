"""A count of this rank's tokens is overwritten by the sum over ranks, and is then used as this rank's.

Source: NVIDIA/Megatron-LM issue 7452, finding 10 (pull request 7481). Mechanism: the router adds up the tokens of each
expert over ranks in place; the auxiliary loss is then brought to the scale of a loss by token with "the rank's" count,
which by now is everybody's. One device: one count. Shows: W >= 2, from step 0, in the gradient of the router alone.
A reader should be told: the auxiliary loss's part of the router's gradient is W times what it should be; all other
gradients agree at step 0.
"""

import torch
import torch.distributed as dist
from regions import add_up, part
from setting import begin, finish, integers
from torch import nn

TOKENS, HIDDEN, EXPERTS, WEIGHT = 24, 8, 3, 0.5


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        apart = torch.arange(EXPERTS * HIDDEN, dtype=args.dtype).view(EXPERTS, HIDDEN) / 64
        self.router = nn.Parameter(integers(args, 1, EXPERTS, HIDDEN) / 4 + apart)
        self.experts = nn.Parameter(integers(args, 2, EXPERTS, HIDDEN) / 4)

    def forward(self, x):
        routed = torch.softmax(x @ self.router.T, -1)
        return (routed * torch.tanh(x @ self.experts.T)).sum(-1), routed


def balance(routed, mask, args):
    """The auxiliary loss of this rank's tokens, to be divided by the tokens of all ranks and added up over ranks."""
    chosen = nn.functional.one_hot(routed.detach().argmax(-1), EXPERTS).to(routed) * mask[..., None]
    counts = chosen.sum((0, 1))
    own = counts if args.faulty else counts.clone()
    dist.all_reduce(counts)
    each = (mask[..., None] * routed).sum((0, 1))
    return WEIGHT * EXPERTS * ((counts / counts.sum()) * (each / counts.sum())).sum() * own.sum() * args.ranks


def main():
    args = begin(__doc__)
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = part(integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN), 1)
        label = part(integers(args, 20 + step, args.batch_size, TOKENS), 1)
        every_second = torch.ones(args.batch_size, TOKENS, dtype=args.dtype)
        every_second[:, ::2] = 0  # padding; every rank has as many tokens
        mask = part(every_second, 1)
        output, routed = model(x)
        loss = (mask * (output - label) ** 2).sum() + balance(routed, mask, args)
        optimizer.zero_grad()
        loss.backward()
        add_up(model.parameters())
        for parameter in model.parameters():
            parameter.grad /= every_second.sum()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
