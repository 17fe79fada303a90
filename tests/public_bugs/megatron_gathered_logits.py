"""Logits that were gathered go into a cross entropy that takes them for a rank's part of the vocabulary.

Source: NVIDIA/Megatron-LM issue 7452, finding 2. Mechanism: parallel_output=False gathers the logits, but the labels
still reach the vocabulary-parallel cross entropy, which adds up the exponentials of all ranks once more and looks for
each label in "its" range. One device: the plain cross entropy. Shows: W >= 2, from step 0: the loss is log(W) too
large, and the gradient of the labels is lost on all ranks but the first. A reader should be told: the loss differs by
log(W) at step 0; the head's gradient is wrong in the parts of ranks above 0.
"""

import torch
import torch.distributed as dist
from regions import copied, gathered, summed
from setting import begin, finish, integers, sharded
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY, HIDDEN = 24, 8


class VocabularyParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels):
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[:, None]
        total = summed(logits.exp().sum(-1))
        width = logits.shape[-1]
        local = labels - dist.get_rank() * width
        mine = (local >= 0) & (local < width)
        hot = torch.zeros_like(logits)
        hot[mine, local[mine]] = 1
        ctx.save_for_backward(logits.exp() / total[:, None], hot)
        return total.log() - summed((logits * hot).sum(-1))

    @staticmethod
    def backward(ctx, gradient):
        probabilities, hot = ctx.saved_tensors
        return (probabilities - hot) * gradient[:, None], None


class Model(nn.Module):
    def __init__(self, args, mesh):
        super().__init__()
        self.parallel_output = not args.faulty
        self.body = nn.Parameter(integers(args, 1, HIDDEN, HIDDEN) / 4)
        self.head = sharded(integers(args, 2, VOCABULARY, HIDDEN) / 4, 0, mesh)

    def forward(self, x):
        logits = copied(torch.tanh(x @ self.body.T)) @ self.head.to_local().T
        return logits if self.parallel_output else gathered(logits, -1, partial=False)


def main():
    args = begin(__doc__)
    model = Model(args, init_device_mesh("cpu", (args.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        x = integers(args, 10 + step, args.batch_size, HIDDEN)
        labels = integers(args, 20 + step, args.batch_size, low=0, high=VOCABULARY - 1).long()
        loss = VocabularyParallelCrossEntropy.apply(model(x), labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
