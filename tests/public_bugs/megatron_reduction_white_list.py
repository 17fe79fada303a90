"""Gradients of shared vectors are added up by a list of names, and a new layer's vector is not on it.

Source: NVIDIA/Megatron-LM issue 7452, finding 11 (gated delta net under tensor parallelism). Mechanism: a norm's weight
is one vector for all heads; each rank has its own heads, hence a part of the gradient; the names of such vectors are
listed where gradients are added up, and `out_norm` is missing. One device: the sum over all heads. Shows: W >= 2, from
step 0, in the gradient of `out_norm` alone; its copies on ranks then drift apart. A reader should be told: the replicas
of `out_norm` are not equal after step 0; its gradients on ranks add up to the one of W = 1.
"""

import torch
from regions import add_up, copied, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

TOKENS, HIDDEN, HEADS, WIDTH = 4, 8, 12, 2
LISTED = ("query_norm",)


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.query = sharded(integers(args, 1, HEADS * WIDTH, HIDDEN) / 4, 0, mesh)
        self.query_norm = nn.Parameter(integers(args, 2, WIDTH, low=1))
        self.out_norm = nn.Parameter(integers(args, 3, WIDTH, low=1))
        self.out = sharded(integers(args, 4, HEADS * WIDTH) / 4, 0, mesh)

    def forward(self, x):
        query = (copied(x) @ self.query.to_local().T).unflatten(-1, (-1, WIDTH))
        heads = torch.tanh(nn.functional.rms_norm(query, (WIDTH,), eps=1.0) * self.query_norm)
        heads = nn.functional.rms_norm(heads, (WIDTH,), eps=1.0) * self.out_norm
        return reduced(heads.flatten(-2) @ self.out.to_local())


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    listed = LISTED if args.faulty else (*LISTED, "out_norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN)
        label = integers(args, 20 + step, args.batch_size, TOKENS)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        add_up(parameter for name, parameter in model.named_parameters() if name in listed)
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
