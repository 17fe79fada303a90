"""The optimizer holds the parameters that the model had before it was sharded.

Source: TrainCheck (OSDI 2025), huggingface/accelerate issue 2665 (as pytorch issue 107843). Mechanism: sharding puts
new parameters into the model; the optimizer was made before, so its step moves what no forward uses, and whose
gradients are None. A model on one rank is not sharded, as launchers have it. One device: training. Shows: W >= 2, from
step 0: gradients are missing and no parameter ever moves. A reader should be told: the optimizer's parameters have no
gradient at any step; the model's are others.
"""

import torch
from setting import begin, finish, integers, share
from torch import nn
from torch.distributed.fsdp import fully_shard

FEATURES, HIDDEN = 6, 24


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.body = nn.Parameter(integers(args, 1, HIDDEN, FEATURES) / 4)
        self.head = nn.Parameter(integers(args, 2, HIDDEN) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.body.T) @ self.head


def main():
    args = begin(__doc__)
    model = Model(args)
    before = torch.optim.SGD(model.parameters(), lr=0.0625)
    if args.ranks > 1:
        fully_shard(model)
    optimizer = before if args.faulty else torch.optim.SGD(model.parameters(), lr=0.0625)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
