"""Train an MLP and attention block with tensor parallelism: every rank sees the same batch.

torchrun --nproc-per-node 4 tensor_parallel.py --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HIDDEN, HEADS = 24, 48, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_width = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH)
        self.wk = nn.Linear(WIDTH, WIDTH)
        self.wv = nn.Linear(WIDTH, WIDTH)
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_width).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(dim=1))


PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(args.seed)
    model = Model(args.layers)
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, foreach=False)

    generator = torch.Generator().manual_seed(args.seed + 1)
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 5, 7, generator=generator)
        y = torch.stack([x.sum(dim=(1, 2)), x.amax(dim=(1, 2)), x[:, 0, 0]], dim=1)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.8f}")

    with torch.no_grad():
        x = torch.randn(32, 5, 7, generator=generator)
        final = model(x).square().mean()
    if dist.get_rank() == 0:
        print(f"final output {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
