"""Gradients of replicated parameters are clipped on the first rank only.

Source: TrainCheck (OSDI 2025), deepspeed-1801 (DeepSpeed's BF16_Optimizer in BLOOM-176B). Mechanism: the list of
gradients that make the norm has replicated parameters on tensor-parallel rank 0 alone, so that they count once; the
same list is what gets clipped. One device: all gradients clipped. Shows: W >= 2 where clipping acts, from step 0, in
the `norm` of ranks above 0, which drifts away from rank 0's. A reader should be told: the replicas of `norm` are not
equal after step 0; rank 0's agrees with W = 1, the others' gradient is larger by one factor.
"""

import torch
import torch.distributed as dist
from regions import copied, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

HIDDEN, WIDE, LONGEST = 8, 24, 0.5


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.norm = nn.Parameter(integers(args, 1, HIDDEN, low=1))
        self.column = sharded(integers(args, 2, WIDE, HIDDEN) / 4, 0, mesh)
        self.row = sharded(integers(args, 3, WIDE) / 4, 0, mesh)

    def forward(self, x):
        normed = nn.functional.rms_norm(x, (HIDDEN,), eps=1.0) * self.norm
        return reduced(torch.tanh(copied(normed) @ self.column.to_local().T) @ self.row.to_local())


def clip(parameters, faulty):
    gradients = [parameter.grad for parameter in parameters]
    counted = [gradient for gradient in gradients if isinstance(gradient, DTensor) or dist.get_rank() == 0]
    squares = sum((local(gradient) ** 2).sum() for gradient in counted)
    dist.all_reduce(squares)
    for gradient in counted if faulty else gradients:
        local(gradient).mul_((LONGEST / squares.sqrt()).clamp(max=1))


def local(gradient):
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, HIDDEN)
        label = integers(args, 20 + step, args.batch_size)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        clip(list(model.parameters()), args.faulty)
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
