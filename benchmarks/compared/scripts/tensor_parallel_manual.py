"""Train with hand-written tensor parallelism: column and row parallel layers and a parallel cross entropy.

torchrun --nproc-per-node 4 tensor_parallel_manual.py --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class CopyToRegion(torch.autograd.Function):
    """The identity forward, a sum over ranks backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromRegion(torch.autograd.Function):
    """A sum over ranks forward, the identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard_of(weight, dim):
    return nn.Parameter(weight.detach().chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].clone())


class ColumnParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight = shard_of(whole.weight, 0)
        self.bias = shard_of(whole.bias, 0)

    def forward(self, x):
        return F.linear(CopyToRegion.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight = shard_of(whole.weight, 1)
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        partial = F.linear(x, self.weight)
        return ReduceFromRegion.apply(partial) + self.bias


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = ColumnParallel(width, hidden)
        self.down = RowParallel(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab, width, hidden, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = ColumnParallel(width, vocab)

    def forward(self, ids):
        """Logits of the rank's own part of the vocabulary."""
        return self.head(self.norm(self.blocks(self.embed(ids))))


def parallel_cross_entropy(logits, labels):
    """Mean cross entropy of logits whose last dimension is split over ranks."""
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    logits = logits - largest.unsqueeze(-1)
    total = ReduceFromRegion.apply(logits.exp().sum(dim=-1))
    first = dist.get_rank() * logits.shape[-1]
    local = labels - first
    here = (local >= 0) & (local < logits.shape[-1])
    chosen = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    chosen = ReduceFromRegion.apply(chosen * here)
    return (total.log() - chosen).mean()


def clip_by_global_norm(model, max_norm):
    """Parts of the norm are summed over ranks; what is replicated counts once."""
    sharded = torch.zeros(())
    replicated = torch.zeros(())
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_shard = isinstance(module, ColumnParallel) or (isinstance(module, RowParallel) and name == "weight")
            if is_shard:
                sharded += parameter.grad.square().sum()
            else:
                replicated += parameter.grad.square().sum()
    dist.all_reduce(sharded)
    norm = (sharded + replicated).sqrt()
    for parameter in model.parameters():
        parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--max-norm", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = Model(vocab=48, width=16, hidden=48, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    generator = torch.Generator().manual_seed(args.seed + 1)
    for step in range(args.steps):
        ids = torch.randint(0, 48, (args.batch_size, 7), generator=generator)
        labels = (3 * ids + 1) % 48
        optimizer.zero_grad()
        loss = parallel_cross_entropy(model(ids), labels)
        loss.backward()
        norm = clip_by_global_norm(model, args.max_norm)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.8f} norm {norm.item():.8f}")

    with torch.no_grad():
        ids = torch.arange(48).view(6, 8)
        final = parallel_cross_entropy(model(ids), (3 * ids + 1) % 48)
    if dist.get_rank() == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
