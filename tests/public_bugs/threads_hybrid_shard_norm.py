"""Under hybrid sharding the norm adds up the replicas too.

Source: ByteDance-Seed/VeOmni issue 184 (pull request 862), proved there by a script. Mechanism: squares of the shards
are added up over all ranks instead of over those that share one copy of the model, so each counts as often as there are
copies. One device: once. Shows: W = 2 and 4, where there are two copies, and where clipping acts, from step 0, in all
gradients after clipping, by one factor; not at W = 3, which has one copy. A reader should be told: gradients before
clipping agree; the norm is the root of 2 times that of W = 1.
"""

import torch
import torch.distributed as dist
from setting import begin, finish, integers, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, HIDDEN, LONGEST = 6, 12, 0.5


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.body = nn.Parameter(integers(args, 1, HIDDEN, FEATURES) / 4)
        self.head = nn.Parameter(integers(args, 2, HIDDEN) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.body.T) @ self.head


def main():
    args = begin(__doc__)
    copies = 2 if args.ranks % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (copies, args.ranks // copies), mesh_dim_names=("replica", "shard"))
    model = Model(args)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        squares = sum((gradient**2).sum() for gradient in gradients)
        dist.all_reduce(squares, group=None if args.faulty else mesh["shard"].get_group())
        for gradient in gradients:
            gradient.mul_((LONGEST / squares.sqrt()).clamp(max=1))
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
