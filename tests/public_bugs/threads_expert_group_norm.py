"""Each rank forms its own "global" norm, of what all share and of its own experts.

Source: NVIDIA-NeMo/Automodel issue 3816, proved there by a script on two gloo ranks. Mechanism: the norm of a sharded
parameter is added up along its mesh; experts are plain tensors, each rank has others, and their part is not added up.
Each rank clips by another factor, its shard of what all share included. One device: one norm. Shows: W >= 2 where
clipping acts, from step 0, in all gradients after clipping. A reader should be told: ranks return different norms for
one step, all of them smaller than at W = 1; the shards of `shared` are clipped by different factors.
"""

import torch
import torch.distributed as dist
from regions import copied, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

FEATURES, HIDDEN, EXPERTS, LONGEST = 6, 12, 12, 0.5


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.shared = sharded(integers(args, 1, HIDDEN, FEATURES) / 4, 0, mesh)
        own = range(args.rank * EXPERTS // args.ranks, (args.rank + 1) * EXPERTS // args.ranks)
        self.experts = nn.ParameterDict(
            {str(number): nn.Parameter(integers(args, 2 + number, HIDDEN) / 4) for number in own}
        )

    def forward(self, x):
        hidden = copied(torch.tanh(x @ self.shared.full_tensor().T))
        return reduced(sum(torch.tanh(hidden @ expert) for expert in self.experts.values()))


def clip(model, faulty):
    shared = (model.shared.grad.to_local() ** 2).sum()
    experts = sum((expert.grad**2).sum() for expert in model.experts.values())
    dist.all_reduce(shared)
    if not faulty:
        dist.all_reduce(experts)
    factor = (LONGEST / (shared + experts).sqrt()).clamp(max=1)
    for parameter in model.parameters():
        gradient = parameter.grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 30 + step, args.batch_size, FEATURES)
        label = integers(args, 40 + step, args.batch_size)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        clip(model, args.faulty)
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
