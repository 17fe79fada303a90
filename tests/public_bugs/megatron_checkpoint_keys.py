"""A checkpoint is read by the stage's own numbers of layers, so that each stage gets the first stage's.

Source: NVIDIA/Megatron-LM issue 7452, finding 12 (Megatron-FSDP checkpoints, pipelines of another size). Mechanism: a
stage numbers its layers from 0, and these numbers are the keys of the checkpoint; one that was saved by one stage is
loaded strictly, and without a word, by W stages: shapes fit, and every stage starts with layers 0, 1, ... One device:
all layers continue as they were. Shows: W >= 2, from the first step after loading, in all parameters of stages above
0. A reader should be told: at the first step of the second optimizer the parameters of a stage above 0 before the step
are not those that layer had at the last step before; they equal those of another layer.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from setting import begin, finish, integers
from torch import nn

LAYERS, HIDDEN = 12, 8


class Layer(nn.Module):
    def __init__(self, args, number):
        super().__init__()
        self.weight = nn.Parameter(integers(args, 1 + number, HIDDEN, HIDDEN) / 8)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight.T) / 4


class Stage(nn.Module):
    def __init__(self, args, numbers):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer(args, number) for number in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def load(stage, path, faulty):
    saved = torch.load(path)
    for place, (number, layer) in enumerate(stage.layers.items()):
        layer.load_state_dict({"weight": saved[f"layers.{place if faulty else number}.weight"]})


def through_stages(stage, x, label):
    """Forward and backward of one batch; what a stage needs of its neighbours comes and goes as messages."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        dist.recv(x, rank - 1)
    x.requires_grad_()
    output = stage(x)
    if rank == last:
        ((output - label) ** 2).mean().backward()
    else:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)


def main():
    args = begin(__doc__)
    batches = [
        (integers(args, 20 + step, args.batch_size, HIDDEN), integers(args, 30 + step, args.batch_size, HIDDEN))
        for step in range(2 * args.steps)
    ]
    whole = Stage(args, range(LAYERS))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.25)
    for x, label in batches[: args.steps]:
        optimizer.zero_grad()
        ((whole(x) - label) ** 2).mean().backward()
        optimizer.step()
    folder = [tempfile.mkdtemp() if args.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "checkpoint.pt")
    if args.rank == 0:
        torch.save(whole.state_dict(), path)
    dist.barrier()
    count = LAYERS // args.ranks
    stage = Stage(args, range(args.rank * count, (args.rank + 1) * count))
    load(stage, path, args.faulty)
    dist.barrier()
    if args.rank == 0:
        path.unlink()
        path.parent.rmdir()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.25)
    for x, label in batches[args.steps :]:
        optimizer.zero_grad()
        through_stages(stage, x, label)
        optimizer.step()
    finish(stage)


if __name__ == "__main__":
    main()
