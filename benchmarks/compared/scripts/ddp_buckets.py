"""Fine-tune a two-tower model with DistributedDataParallel: frozen stem, static graph, optional compression.

torchrun --nproc-per-node 4 ddp_buckets.py --batch-size 6 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.left = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.right = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.linspace(-1, 1, width))
        self.stem.requires_grad_(False)

    def forward(self, a, b):
        left = self.left(torch.relu(self.stem(a)) + self.offset)
        right = self.right(torch.relu(self.stem(b)) - self.offset)
        return self.scale * F.cosine_similarity(left, right, dim=-1)


def pairs(generator, count):
    a = torch.randn(count, 8, generator=generator)
    b = a + 0.7 * torch.randn(count, 8, generator=generator)
    return a, b, F.cosine_similarity(a, b, dim=-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--compress", choices=["none", "fp16"], default="none")
    parser.add_argument("--bucket-mb", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    model = DDP(TwoTowers(), bucket_cap_mb=args.bucket_mb, static_graph=True)
    hook = fp16_compress_hook if args.compress == "fp16" else allreduce_hook
    model.register_comm_hook(None, hook)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.RMSprop(trainable, lr=args.lr * 1e-2, momentum=0.5)

    generator = torch.Generator().manual_seed(args.seed + 3)
    for step in range(args.steps):
        a, b, similarity = (part.chunk(world_size)[rank] for part in pairs(generator, args.batch_size * world_size))
        loss = F.mse_loss(model(a, b), similarity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(shown := loss.detach().clone())
        if rank == 0:
            print(f"step {step} loss {shown.item() / world_size:.8f}")

    a, b, similarity = pairs(generator, 64)
    with torch.no_grad():
        final = F.mse_loss(model.module(a, b), similarity)
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
