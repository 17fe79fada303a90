"""Train a language model with tied embeddings; gradients are averaged by hand, without a wrapper.

torchrun --nproc-per-node 4 tied_lm.py --batch-size 3 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class TiedLM(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        hidden, _ = self.rnn(self.embedding(ids))
        return self.decoder(self.norm(hidden))


def broadcast_parameters(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model):
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= world_size


def text(seed, vocab, length):
    """A Markov chain: each token depends on the one before."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(1, 5, (length,), generator=generator)
    return torch.cumsum(jumps, dim=0) % vocab


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=50)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed + rank)
    model = TiedLM(args.vocab, args.width)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    corpus = text(args.seed, args.vocab, 20_000)

    def sequences(first, count):
        starts = (torch.arange(first, first + count) * args.length)[:, None]
        window = corpus[starts + torch.arange(args.length + 1)]
        return window[:, :-1], window[:, 1:]

    for step in range(args.steps):
        ids, labels = sequences((step * world_size + rank) * args.batch_size, args.batch_size)
        model.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        average_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        losses = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(losses, loss.detach())
        if rank == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.8f} norm {norm.item():.8f}")

    with torch.no_grad():
        ids, labels = sequences(1500, 16)
        final = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
