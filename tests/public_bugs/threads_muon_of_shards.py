"""Muon makes each rank's rows orthogonal, not the matrix.

Source: deepspeedai/DeepSpeed issue 8437, proved there by a script (gradients equal to 7e-7, updates apart by 39 %).
Mechanism: the Newton-Schulz iteration is a function of a whole matrix; under tensor parallelism it runs on the rows
that a rank holds. One device: on the whole matrix. Shows: W >= 2, from step 0, in parameters though gradients agree.
A reader should be told: gradients at step 0 agree, the parameter after step 0 does not: the optimizer's rule is not one
of single entries.
"""

import torch
from regions import copied, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

HIDDEN, WIDE = 8, 24


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.column = sharded(integers(args, 1, WIDE, HIDDEN) / 4, 0, mesh)
        self.row = sharded(integers(args, 2, HIDDEN, WIDE) / 4, 1, mesh)

    def forward(self, x):
        return reduced(torch.tanh(copied(x) @ self.column.to_local().T) @ self.row.to_local().T)


def orthogonal(matrix):
    matrix = matrix / matrix.norm()
    for _ in range(3):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix - 4.775 * (gram @ matrix) + 2.0315 * (gram @ gram @ matrix)
    return matrix


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr, of_shards):
        super().__init__(parameters, {"lr": lr, "of_shards": of_shards})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.update(parameter.grad, group["of_shards"]), alpha=group["lr"])

    @staticmethod
    def update(gradient, of_shards):
        mesh, placements = gradient.device_mesh, gradient.placements
        if of_shards:
            return DTensor.from_local(orthogonal(gradient.to_local()), mesh, placements, run_check=False)
        dim = placements[0].dim
        whole = orthogonal(gradient.full_tensor()).chunk(mesh.size(), dim)[mesh.get_local_rank()]
        return DTensor.from_local(whole.contiguous(), mesh, placements, run_check=False)


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = Muon(model.parameters(), 0.125, args.faulty)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, HIDDEN)
        label = integers(args, 20 + step, args.batch_size, HIDDEN)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
