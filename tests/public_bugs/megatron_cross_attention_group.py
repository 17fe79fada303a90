"""Keys and values are gathered from the ranks of another layout.

Source: NVIDIA/Megatron-LM issue 7452, finding 6 (cross attention, explicit process groups). Mechanism: where there are
fewer key-value heads than ranks, each rank computes a slice of them and gathers the rest of the tensor-parallel group;
the gather asks for the process's global group. Of 4 ranks, the model's groups are {0, 1} and {2, 3}, the global ones
{0, 2} and {1, 3}: a rank gets the same slice twice, the second of another replica's data. One device: all slices of
the same rows. Shows: W = 4, from step 0, in losses and gradients; not at W = 2. A reader should be told: the loss
differs at W = 4, agrees at W = 2; the collective before it is the all_gather of keys and values.
"""

import torch
import torch.distributed as dist
from regions import add_up, copied, gathered, reduced
from setting import begin, finish, integers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

TOKENS, HIDDEN, HEADS, WIDTH = 4, 8, 4, 4


class Model(nn.Module):
    def __init__(self, args, mesh, group, key_group):
        super().__init__()
        self.group, self.key_group = group, key_group
        self.query = sharded(integers(args, 1, HEADS * WIDTH, HIDDEN) / 4, 0, mesh)
        self.key = sharded(integers(args, 2, WIDTH, HIDDEN) / 4, 0, mesh)
        self.value = sharded(integers(args, 3, WIDTH, HIDDEN) / 4, 0, mesh)
        self.out = sharded(integers(args, 4, HEADS * WIDTH) / 4, 0, mesh)

    def forward(self, x, memory):
        memory = copied(memory, self.group)
        query = (copied(x, self.group) @ self.query.to_local().T).unflatten(-1, (-1, WIDTH))
        key, value = (
            gathered(memory @ weight.to_local().T, -1, partial=True, group=self.key_group)
            for weight in (self.key, self.value)
        )
        weights = torch.softmax(torch.einsum("bqhw,bkw->bhqk", query, key), -1)
        heads = torch.einsum("bhqk,bkw->bqhw", weights, value).flatten(-2)
        return reduced(heads @ self.out.to_local(), self.group)


def groups_of(layout):
    """This rank's group of a layout with one row for each group."""
    groups = [dist.new_group(row) for row in layout]
    return next(group for group, row in zip(groups, layout, strict=True) if dist.get_rank() in row)


def main():
    args = begin(__doc__)
    size = min(2, args.ranks)
    replicas = args.ranks // size
    mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("replica", "tensor"))
    global_group = groups_of(torch.arange(args.ranks).view(size, replicas).T.tolist())
    group = mesh["tensor"].get_group()
    model = Model(args, mesh["tensor"], group, global_group if args.faulty else group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(args.steps):
        rows = args.batch_size * args.ranks
        x, memory = (integers(args, seed + step, rows, TOKENS, HIDDEN) for seed in (10, 20))
        label = integers(args, 30 + step, rows, TOKENS)
        x, memory, label = (value.chunk(replicas)[args.rank // size] for value in (x, memory, label))
        loss = ((model(x, memory) - label) ** 2).sum() / (rows * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        add_up(model.parameters(), mesh["replica"].get_group())
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
