"""A layer leaves its sum over ranks to a later one that does not come.

Source: Entangle (ASPLOS 2026; arXiv 2508.09505), a missing all-reduce by a wrong switch. Mechanism: a row-parallel
layer has a switch that says that its partial sums are added up elsewhere; it is on where nothing else adds them up.
One device: one sum. Shows: W >= 2, from step 0: each rank goes on with its own partial sum, so losses and all gradients
differ, and the ranks do not agree on the replicated `norm` and `head`. A reader should be told: the loss differs on
every rank; the ranks' replicas are not equal after step 0; the forward of W ranks issues no collective.
"""

import torch
from regions import copied, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

HIDDEN, WIDE = 8, 24


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.added_up_elsewhere = args.faulty
        self.norm = nn.Parameter(integers(args, 1, HIDDEN, low=1))
        self.column = sharded(integers(args, 2, WIDE, HIDDEN) / 4, 0, mesh)
        self.row = sharded(integers(args, 3, HIDDEN, WIDE) / 4, 1, mesh)
        self.head = nn.Parameter(integers(args, 4, HIDDEN) / 4)

    def forward(self, x):
        normed = nn.functional.rms_norm(x, (HIDDEN,), eps=1.0) * self.norm
        output = torch.tanh(copied(normed) @ self.column.to_local().T) @ self.row.to_local().T
        return (x + (output if self.added_up_elsewhere else reduced(output))) @ self.head


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, HIDDEN)
        label = integers(args, 20 + step, args.batch_size)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
