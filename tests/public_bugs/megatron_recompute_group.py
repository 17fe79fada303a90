"""Activations are saved in parts by a group of ranks that do not hold the same activation.

Source: NVIDIA/Megatron-LM issue 7452, finding 4 (full recompute with distributed saved activations). Mechanism: each
rank keeps its part of a block's input and gathers the parts before it computes the block again; the groups of the
model are passed in explicitly, but this code asks for the process's global group, whose ranks are replicas with other
data. One device: the same block on the same input. Shows: W >= 2, from step 0, in the gradients of the block and of
what stands before it; losses are right at step 0. A reader should be told: the forward agrees, the gradients of
`block` and `body` do not, and the collective before them is an all_gather inside backward.
"""

import torch
import torch.distributed as dist
from regions import add_up, joined, part
from setting import begin, finish, integers, share
from torch import nn
from torch.autograd import Function

HIDDEN = 12


class Recomputed(Function):
    @staticmethod
    def forward(ctx, x, block, group):
        ctx.block, ctx.group, ctx.shape = block, group, x.shape
        ctx.save_for_backward(part(x.detach().flatten(), 0, group))
        return block(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        x = joined(ctx.saved_tensors[0], 0, ctx.group).view(ctx.shape).requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(gradient)
        return x.grad, None, None


class Model(nn.Module):
    def __init__(self, args, group):
        super().__init__()
        self.group = group
        self.body = nn.Parameter(integers(args, 1, HIDDEN, HIDDEN) / 4)
        self.block = nn.Parameter(integers(args, 2, HIDDEN, HIDDEN) / 4)
        self.head = nn.Parameter(integers(args, 3, HIDDEN) / 4)

    def forward(self, x):
        hidden = torch.tanh(x @ self.body.T)
        return Recomputed.apply(hidden, lambda h: torch.tanh(h @ self.block.T), self.group) @ self.head


def main():
    args = begin(__doc__)
    tensor_parallel = [dist.new_group([rank]) for rank in range(args.ranks)][args.rank]
    model = Model(args, dist.group.WORLD if args.faulty else tensor_parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, HIDDEN))
        label = share(args, integers(args, 20 + step, rows))
        loss = ((model(x) - label) ** 2).sum() / rows
        optimizer.zero_grad()
        loss.backward()
        add_up(model.parameters())
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
