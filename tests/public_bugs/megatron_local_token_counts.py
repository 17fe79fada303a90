"""A second loss is normalized by the rank's own token counts, the first by those of all ranks.

Source: NVIDIA/Megatron-LM issue 7452, finding 3 (multi-token prediction with calculate_per_token_loss). Mechanism:
gradients are sums over tokens, divided by all ranks' tokens at the end; the second loss, which has other tokens, is
brought to the first's scale by the ratio of the two counts, and that ratio is the rank's own. One device: the ratio of
the whole batch. Shows: W >= 2 where ranks have unequal counts, from step 0, in all gradients but that of the first
head. A reader should be told: the gradient of `second` is a sum over ranks with weights that depend on each rank's
counts, so no common factor explains it.
"""

import torch
import torch.distributed as dist
from regions import add_up
from setting import begin, finish, integers, share
from torch import nn

TOKENS, HIDDEN = 4, 8


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.body = nn.Parameter(integers(args, 1, HIDDEN, HIDDEN) / 4)
        self.first = nn.Parameter(integers(args, 2, HIDDEN) / 4)
        self.second = nn.Parameter(integers(args, 3, HIDDEN) / 4)

    def forward(self, x):
        hidden = torch.tanh(x @ self.body.T)
        return hidden @ self.first, hidden @ self.second


def main():
    args = begin(__doc__)
    model = Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x = share(args, integers(args, 10 + step, rows, TOKENS, HIDDEN))
        label, second_label = (share(args, integers(args, seed + step, rows, TOKENS)) for seed in (20, 30))
        valid, second_valid = (
            share(args, integers(args, seed + step, rows, TOKENS, low=0, high=1)) for seed in (40, 50)
        )
        outputs = model(x)
        first, second = (
            (mask * (output - wanted) ** 2).sum()
            for output, wanted, mask in zip(outputs, (label, second_label), (valid, second_valid), strict=True)
        )
        own = torch.stack([valid.sum(), second_valid.sum()])
        counts = own.clone()
        dist.all_reduce(counts)
        ratio = own[0] / own[1] if args.faulty else counts[0] / counts[1]
        optimizer.zero_grad()
        (first + ratio * second).backward()
        add_up(model.parameters())
        for parameter in model.parameters():
            parameter.grad /= counts[0]
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
