"""The replicated factor of an adapter sees this rank's part of the sequence, and its gradient is not added up.

Source: modelscope/mcore-bridge pull request 173 (as Megatron-LM fork ISEEKYAN pull request 131, proved there on two
gloo ranks). Mechanism: of a row-parallel layer's adapter the factor A is split and leaves each rank its tokens, the
factor B is replicated and acts on them; B lacks the mark by which gradients of sequence parallelism are added up.
One device: all tokens. Shows: W >= 2, from step 0, in the gradient of `b`, whose copies drift apart; what is saved is
rank 0's. A reader should be told: the replicas of `b` are not equal after step 0; the gradients of ranks add up to that
of W = 1.
"""

import torch
from regions import add_up, part, scattered
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

TOKENS, WIDE, HIDDEN, RANK = 12, 24, 8, 2


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.base = sharded(integers(args, 1, HIDDEN, WIDE) / 4, 1, mesh).requires_grad_(False)
        self.a = sharded(integers(args, 2, RANK, WIDE) / 4, 1, mesh)
        self.b = nn.Parameter(integers(args, 3, HIDDEN, RANK) / 4)

    def forward(self, x):
        x = part(x, -1)
        output = scattered(x @ self.base.to_local().T, 1, partial=True)
        return torch.tanh(output + scattered(x @ self.a.to_local().T, 1, partial=True) @ self.b.T)


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD([model.a, model.b], lr=0.25)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, TOKENS, WIDE)
        label = part(integers(args, 20 + step, args.batch_size, TOKENS, HIDDEN), 1)
        optimizer.zero_grad()
        (((model(x) - label) ** 2).sum() / (args.batch_size * TOKENS)).backward()
        if not args.faulty:
            add_up([model.b])
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
