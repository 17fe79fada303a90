"""Train a small causal transformer with FSDP2 (fully_shard) and gradient clipping.

torchrun --nproc-per-node 4 fsdp2_transformer.py --batch-size 3 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, HEADS, LENGTH = 61, 32, 4, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch_of(step, rank, world_size, batch_size, seed):
    """Rows of the global batch of a step are drawn alike on all ranks; each rank takes its own."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    ids = torch.randint(0, VOCAB, (batch_size * world_size, LENGTH + 1), generator=generator)
    mine = ids[rank * batch_size : (rank + 1) * batch_size]
    return mine[:, :-1], mine[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    torch.manual_seed(args.seed)
    model = Transformer(args.layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    for step in range(args.steps):
        ids, labels = batch_of(step, rank, world_size, args.batch_size, args.seed)
        logits = model(ids)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()

        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.SUM)
        mean_loss /= world_size
        total_norm = norm.full_tensor()
        if rank == 0:
            print(f"step {step} loss {mean_loss.item():.8f} grad norm {total_norm.item():.8f}")

    with torch.no_grad():
        ids, labels = batch_of(args.steps, 0, 1, 8, args.seed)
        final = F.cross_entropy(model(ids).reshape(-1, VOCAB), labels.reshape(-1))
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
