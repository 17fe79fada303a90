"""Experts that are spread over ranks have seen all ranks' rows, and are not divided as all else is.

Source: pytorch/pytorch issue 160285, proved there by a script on two ranks. Mechanism: each rank's loss is the mean of
its own rows, and gradients of replicated parameters are averaged over ranks; an expert gets the rows of all ranks, so
its gradient is a sum over ranks already, and nothing divides it. One device: the mean over all rows. Shows: W >= 2,
from step 0, in the gradients of `experts`, which are W times too large. A reader should be told: that factor. Adam
hides it but for clipping and weight decay.
"""

import torch
from regions import add_up, gathered, scattered
from setting import begin, finish, integers, sharded, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

FEATURES, EXPERTS = 8, 12


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.router = nn.Parameter(integers(args, 1, EXPERTS, FEATURES) / 4)
        self.experts = sharded(integers(args, 2, EXPERTS, FEATURES) / 4, 0, mesh)

    def forward(self, x):
        routed = torch.softmax(x @ self.router.T, -1)
        everyones, everyones_routed = gathered(x, 0, partial=True), gathered(routed, 0, partial=True)
        experts = self.experts.to_local()
        own = everyones_routed.chunk(self.experts.device_mesh.size(), -1)[self.experts.device_mesh.get_local_rank()]
        return scattered((own * torch.tanh(everyones @ experts.T)).sum(-1), 0, partial=True)


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, FEATURES))
        label = share(args, integers(args, 20 + step, rows))
        optimizer.zero_grad()
        ((model(x) - label) ** 2).mean().backward()
        add_up([model.router])
        for parameter in [model.router] if args.faulty else list(model.parameters()):
            parameter.grad /= args.ranks
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
