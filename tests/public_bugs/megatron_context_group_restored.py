"""An attention puts back the group that it was built with, not the one that was in force.

Source: NVIDIA/Megatron-LM issue 7452, finding 13 (`attention_restores_build_time_cp_group`). The thread's script could
not be read whole: this is our reading of its name and of its reference, attention over the full sequence. Mechanism:
the group along which a sequence is split is set for a step; after its first micro-batch the attention falls back to the
group of its construction (this rank alone), so that from the second on a rank attends to its own tokens only. One
device: all tokens. Shows: W >= 2 with two micro-batches or more, from step 0, in losses and gradients. A reader should
be told: the loss of the first micro-batch agrees, that of the second does not, though inputs do; there is no all_gather
before it.
"""

import torch
import torch.distributed as dist
from regions import add_up, gathered, part
from setting import begin, finish, integers
from torch import nn

TOKENS, HIDDEN = 12, 8


class Attention(nn.Module):
    def __init__(self, args, group):
        super().__init__()
        self.built_with = self.group = group
        self.faulty = args.faulty
        self.query, self.key, self.value = (
            nn.Parameter(integers(args, seed, HIDDEN, HIDDEN) / 4) for seed in (1, 2, 3)
        )
        self.out = nn.Parameter(integers(args, 4, HIDDEN) / 4)

    def forward(self, x):
        key, value = (gathered(x @ w.T, 1, partial=True, group=self.group) for w in (self.key, self.value))
        weights = torch.softmax((x @ self.query.T) @ key.transpose(1, 2), -1)
        if self.faulty:
            self.group = self.built_with
        return (weights @ value) @ self.out


def main():
    args = begin(__doc__, micro_batches=2)
    alone = [dist.new_group([rank]) for rank in range(args.ranks)][args.rank]
    model = Attention(args, alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = part(integers(args, 10 + step, args.batch_size, TOKENS, HIDDEN), 1)
        label = part(integers(args, 20 + step, args.batch_size, TOKENS), 1)
        optimizer.zero_grad()
        model.group = dist.group.WORLD
        for rows, labels in zip(x.chunk(args.micro_batches), label.chunk(args.micro_batches), strict=True):
            loss = ((model(rows) - labels) ** 2).sum() / (args.batch_size * TOKENS)
            loss.backward()
        add_up(model.parameters())
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
