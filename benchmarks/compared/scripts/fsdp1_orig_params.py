"""Train with FullyShardedDataParallel (use_orig_params) and its own gradient clipping.

torchrun --nproc-per-node 4 fsdp1_orig_params.py --batch-size 6 --steps 5
"""

import argparse
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=20, depth=3, classes=7):
        super().__init__()
        self.stem = nn.Linear(11, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--max-norm", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = FSDP(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight") or "norm" in name]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        momentum=0.9,
    )

    generator = torch.Generator().manual_seed(args.seed + 1)
    x_all = torch.randn(args.steps + 1, args.batch_size * world_size, 11, generator=generator)
    y_all = (x_all[..., :7] + x_all[..., 4:11]).argmax(dim=-1)
    mine = functools.partial(slice, rank * args.batch_size, (rank + 1) * args.batch_size)()

    for step in range(args.steps):
        x, y = x_all[step, mine], y_all[step, mine]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        mean_loss = loss.detach() / world_size
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"step {step} loss {mean_loss.item():.8f} norm {norm.item():.8f}")

    model.eval()
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(x_all[-1]), y_all[-1])
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
