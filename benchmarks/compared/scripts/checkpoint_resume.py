"""Train with FSDP2, save a checkpoint in the middle, and go on from it in a new model, as after a restart.

Saves both a distributed checkpoint and a plain file of the full state.

torchrun --nproc-per-node 4 checkpoint_resume.py --batch-size 3 --steps 6 --save-at 3
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


class Regressor(nn.Module):
    def __init__(self, width=26):
        super().__init__()
        self.first = nn.Linear(9, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, 1)

    def forward(self, x):
        x = F.gelu(self.first(x))
        x = x + F.gelu(self.second(x))
        return self.third(x).squeeze(-1)


def build(seed, lr):
    torch.manual_seed(seed)
    model = Regressor()
    fully_shard(model.second)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return model, optimizer, scheduler


def save(folder, model, optimizer, scheduler, step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict(), "step": step}
    dcp.save(state, checkpoint_id=folder / "distributed")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": full, "step": step}, folder / "full.pt")


def load(folder, model, optimizer, scheduler):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder / "distributed")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def rows_of(step, count, seed):
    generator = torch.Generator().manual_seed(seed * 9176 + step)
    x = torch.randn(count, 9, generator=generator)
    return x, x[:, 0] * x[:, 1] + x[:, 2:].sum(dim=1).tanh()


def train(model, optimizer, scheduler, steps, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x, y = rows_of(step, args.batch_size * world_size, args.seed)
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world_size:.8f} lr {scheduler.get_last_lr()[0]:.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="per rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    folder = Path(where[0])

    model, optimizer, scheduler = build(args.seed, args.lr)
    train(model, optimizer, scheduler, range(args.save_at), args)
    save(folder, model, optimizer, scheduler, args.save_at)
    dist.barrier()

    model, optimizer, scheduler = build(args.seed + 1, args.lr)
    done = load(folder, model, optimizer, scheduler)
    train(model, optimizer, scheduler, range(done, args.steps), args)

    full = torch.load(folder / "full.pt")
    squares = sum(value.double().square().sum() for value in full["model"].values())
    with torch.no_grad():
        x, y = rows_of(1000, 40, args.seed)
        final = F.mse_loss(model(x), y)
    if dist.get_rank() == 0:
        print(f"saved at step {full['step']}: squared parameters {squares.item():.8f}")
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
