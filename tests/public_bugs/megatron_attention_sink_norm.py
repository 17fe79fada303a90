"""A parameter that is split over ranks is counted in the gradient's norm on the first rank only.

Source: NVIDIA/Megatron-LM issue 7452, finding 8 (pull request 7530). Mechanism: the learnable sink of each attention
head is split by heads like all else, but is not marked so; the norm takes unmarked parameters for replicas and counts
them on rank 0 alone. The norm is too small, and clipping leaves gradients that are too long. One device: all heads'
sinks in the norm. Shows: W >= 2 where clipping acts, from step 0, in all gradients after clipping, by one factor.
A reader should be told: gradients before clipping agree; the norm differs, and what is missing are the entries of
`sink` that ranks above 0 hold.
"""

import torch
import torch.distributed as dist
from regions import copied, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

TOKENS, HIDDEN, HEADS, WIDTH, LONGEST = 4, 8, 12, 2, 0.5


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.query = sharded(integers(args, 1, HEADS * WIDTH, HIDDEN) / 16, 0, mesh)
        self.key = sharded(integers(args, 2, HEADS * WIDTH, HIDDEN) / 16, 0, mesh)
        self.value = sharded(integers(args, 3, HEADS * WIDTH, HIDDEN) / 4, 0, mesh)
        self.out = sharded(integers(args, 4, HEADS * WIDTH), 0, mesh)
        self.sink = sharded(integers(args, 5, HEADS, low=1), 0, mesh)

    def forward(self, x):
        x = copied(x)
        query, key, value = (
            (x @ weight.to_local().T).unflatten(-1, (-1, WIDTH)) for weight in (self.query, self.key, self.value)
        )
        scores = torch.einsum("bqhw,bkhw->bhqk", query, key)
        sink = self.sink.to_local()[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        heads = torch.einsum("bhqk,bkhw->bqhw", weights, value).flatten(-2)
        return reduced(heads @ self.out.to_local())


def clip(model, faulty):
    squares = torch.stack(
        [
            (parameter.grad.to_local() ** 2).sum() * (not faulty or name != "sink" or dist.get_rank() == 0)
            for name, parameter in model.named_parameters()
        ]
    ).sum()
    dist.all_reduce(squares)
    factor = (LONGEST / squares.sqrt()).clamp(max=1)
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(factor)


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN)
        label = integers(args, 20 + step, args.batch_size, TOKENS)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        clip(model, args.faulty)
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
