"""Label smoothing takes a rank's part of the vocabulary for the whole of it.

Source: NVIDIA/Megatron-LM issue 7452, finding 1 (and issues 737, 7464). Mechanism: in a cross entropy whose logits are
split by vocabulary, the smoothing's coefficient and the mean log-probability are formed of the rank's own part.
One device: both of the whole vocabulary. Shows: W >= 2, from step 0, in the loss (another one on each rank) and in all
gradients. A reader should be told: the loss differs, and the ranks do not even agree on it.
"""

import torch
import torch.distributed as dist
from regions import copied, summed
from setting import begin, finish, integers, sharded
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY, HIDDEN, SMOOTHING = 24, 8, 0.25


class SmoothedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels, faulty):
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[:, None]
        log_total = summed(logits.exp().sum(-1)).log()
        width = logits.shape[-1]
        local = labels - dist.get_rank() * width
        mine = (local >= 0) & (local < width)
        hot = torch.zeros_like(logits)
        hot[mine, local[mine]] = 1
        of_label = log_total - summed((logits * hot).sum(-1))
        vocabulary = width if faulty else VOCABULARY
        total = logits.sum(-1) if faulty else summed(logits.sum(-1))
        weight = SMOOTHING * vocabulary / (vocabulary - 1)
        ctx.save_for_backward((logits - log_total[:, None]).exp(), hot)
        ctx.weight, ctx.vocabulary = weight, vocabulary
        return (1 - weight) * of_label + weight * (log_total - total / vocabulary)

    @staticmethod
    def backward(ctx, gradient):
        probabilities, hot = ctx.saved_tensors
        each = probabilities - (1 - ctx.weight) * hot - ctx.weight / ctx.vocabulary
        return each * gradient[:, None], None, None


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.body = nn.Parameter(integers(args, 1, HIDDEN, HIDDEN) / 4)
        self.head = sharded(integers(args, 2, VOCABULARY, HIDDEN) / 4, 0, mesh)

    def forward(self, x):
        return copied(torch.tanh(x @ self.body.T)) @ self.head.to_local().T


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, HIDDEN)
        labels = integers(args, 20 + step, args.batch_size, low=0, high=VOCABULARY - 1).long()
        loss = SmoothedCrossEntropy.apply(model(x), labels, args.faulty).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
