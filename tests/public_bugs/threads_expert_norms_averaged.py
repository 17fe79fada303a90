"""Norms of ranks are averaged, as if all ranks held the same parameters.

Source: deepspeedai/DeepSpeed issue 8475 and pull request 8478, proved there by scripts (7.236 for 10.954). Mechanism:
clip_grad_norm_ ends with the mean of the ranks' norms over the data-parallel group; experts are spread over it, so each
rank's norm is of other experts. One device: the root of the sum of all squares. Shows: W >= 2 where clipping acts, from
step 0, in all gradients after clipping, by one factor. A reader should be told: gradients before clipping agree, the
norm is smaller than at W = 1 and the same on all ranks.
"""

import torch
import torch.distributed as dist
from regions import copied, reduced
from setting import begin, finish, integers
from torch import nn

FEATURES, EXPERTS, LONGEST = 8, 12, 0.5


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.router = nn.Parameter(integers(args, 1, EXPERTS, FEATURES) / 4)
        self.own = range(args.rank * EXPERTS // args.ranks, (args.rank + 1) * EXPERTS // args.ranks)
        self.experts = nn.ParameterDict(
            {str(number): nn.Parameter(integers(args, 2 + number, FEATURES) / 4) for number in self.own}
        )

    def forward(self, x):
        routed = copied(torch.softmax(x @ self.router.T, -1))
        return reduced(sum(routed[:, number] * torch.tanh(x @ self.experts[str(number)]) for number in self.own))


def norm_of(model, faulty):
    router = (model.router.grad**2).sum()
    experts = sum((expert.grad**2).sum() for expert in model.experts.values())
    if faulty:
        norm = (router + experts).sqrt() / dist.get_world_size()
        dist.all_reduce(norm)
        return norm
    dist.all_reduce(experts)
    return (router + experts).sqrt()


def main():
    args = begin(__doc__)
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 30 + step, args.batch_size, FEATURES)
        label = integers(args, 40 + step, args.batch_size)
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        factor = (LONGEST / norm_of(model, args.faulty)).clamp(max=1)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
