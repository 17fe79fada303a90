"""Train a gated MLP in bfloat16 with FSDP2: compute in bfloat16, reduce in float32, keep float32 parameters.

torchrun --nproc-per-node 4 fsdp2_bf16.py --batch-size 4 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class GatedMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self, layers, width=32, hidden=80):
        super().__init__()
        self.inlet = nn.Linear(12, width)
        self.layers = nn.ModuleList(GatedMLP(width, hidden) for _ in range(layers))
        self.outlet = nn.Linear(width, 6)

    def forward(self, x):
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.outlet(x)


def shard(model, policy):
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank and step, in micro-batches of 2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(Net(args.layers), policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))

    micro_batches = args.batch_size // 2
    generator = torch.Generator().manual_seed(args.seed + 1)
    for step in range(args.steps):
        x = torch.randn(args.batch_size * world_size, 12, generator=generator)
        y = torch.stack([x[:, i] * x[:, i + 1] for i in range(6)], dim=1)
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        total = torch.zeros(())
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            rows = slice(2 * micro, 2 * micro + 2)
            loss = F.mse_loss(model(x[rows]).float(), y[rows]) / micro_batches
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world_size:.6f} norm {norm.item():.6f}")

    with torch.no_grad():
        x = torch.randn(64, 12, generator=generator)
        final = model(x).float().square().mean()
    if rank == 0:
        print(f"final output {final.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
