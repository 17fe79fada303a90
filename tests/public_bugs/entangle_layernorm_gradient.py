"""With sequence parallelism the gradient of a layer norm is of this rank's tokens, and is not added up.

Source: Entangle (ASPLOS 2026; arXiv 2508.09505), a missing all-reduce of layer norms (as TransformerEngine issue 435,
Megatron-LM issue 1446). Mechanism: the norm is replicated, each rank normalizes its part of the sequence; the loop has
to add up its gradients, and does not. One device: all tokens. Shows: W >= 2, from step 0, in the gradients of
`norm.weight` and `norm.bias`; their copies on ranks drift apart. A reader should be told: the replicas of the norm are
not equal after step 0; the gradients of ranks add up to that of W = 1.
"""

import torch
from regions import add_up, gathered, part, scattered
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

TOKENS, HIDDEN, WIDE = 12, 8, 24


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=args.dtype)
        self.column = sharded(integers(args, 2, WIDE, HIDDEN) / 4, 0, mesh)
        self.row = sharded(integers(args, 3, HIDDEN, WIDE) / 4, 1, mesh)
        self.head = nn.Parameter(integers(args, 4, HIDDEN) / 4)

    def forward(self, x):
        tokens = gathered(self.norm(x), 1, partial=True)
        partial = torch.tanh(tokens @ self.column.to_local().T) @ self.row.to_local().T
        return (x + scattered(partial, 1, partial=True)) @ self.head


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    for step in range(args.steps):
        x = part(integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN), 1)
        label = part(integers(args, 20 + step, args.batch_size, TOKENS), 1)
        optimizer.zero_grad()
        (((model(x) - label) ** 2).sum() / (args.batch_size * TOKENS)).backward()
        add_up([model.head] if args.faulty else [model.head, *model.norm.parameters()])
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
