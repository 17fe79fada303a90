"""The padding mask is split by another layout of ranks than the tokens are.

Source: NVIDIA/Megatron-LM issue 7452, finding 5 (mixture of experts, explicit process groups). Mechanism: with
sequence parallelism each rank has a part of the tokens; the tokens are split by the tensor-parallel group that the
model was given, the mask by the process's global one. Of 4 ranks, the model's groups are {0, 1} and {2, 3}, the global
ones {0, 2} and {1, 3}, so ranks 1 and 2 take the other half's mask. One device: the mask of the same token. Shows:
W = 4, from step 0, in all gradients; not at W = 2, where the two layouts are one. A reader should be told: the
first gradients differ at W = 4 and agree at W = 2, by no common factor.
"""

import torch
import torch.distributed as dist
from regions import add_up, part
from setting import begin, finish, integers
from torch import nn

TOKENS, HIDDEN, EXPERTS = 4, 8, 3


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.router = nn.Parameter(integers(args, 1, EXPERTS, HIDDEN) / 4)
        self.experts = nn.Parameter(integers(args, 2, EXPERTS, HIDDEN) / 4)

    def forward(self, x):
        routed = torch.softmax(x @ self.router.T, -1)
        return (routed * torch.tanh(x @ self.experts.T)).sum(-1), (routed**2).sum(-1)


def groups_of(layout):
    """This rank's group of a layout with one row for each group."""
    groups = [dist.new_group(row) for row in layout]
    return next(group for group, row in zip(groups, layout, strict=True) if dist.get_rank() in row)


def main():
    args = begin(__doc__)
    size = min(2, args.ranks)
    replicas = args.ranks // size
    model_group = groups_of(torch.arange(args.ranks).view(replicas, size).tolist())
    global_group = groups_of(torch.arange(args.ranks).view(size, replicas).T.tolist())
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x, label = integers(args, 10 + step, rows, TOKENS, HIDDEN), integers(args, 20 + step, rows, TOKENS)
        valid = integers(args, 30 + step, rows, TOKENS, low=0, high=1)
        tokens = valid.sum()
        x, label, valid = (value.chunk(replicas)[args.rank // size] for value in (x, label, valid))
        mask = part(valid, 1, global_group if args.faulty else model_group)
        output, balance = model(part(x, 1, model_group))
        loss = (mask * ((output - part(label, 1, model_group)) ** 2 + balance)).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        add_up(model.parameters())
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
