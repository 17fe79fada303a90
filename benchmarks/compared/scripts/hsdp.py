"""Train with hybrid sharding: parameters are sharded within a group and replicated between groups.

torchrun --nproc-per-node 4 hsdp.py --replicas 2 --batch-size 4 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, width=20, layers=2):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--max-norm", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shards = world_size // args.replicas
    mesh = init_device_mesh("cpu", (args.replicas, shards), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(args.seed)
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    # The data-parallel rank: each rank of the mesh has its own rows.
    dp_rank = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
    generator = torch.Generator().manual_seed(args.seed + 11)
    for step in range(args.steps):
        ids = torch.randint(0, 40, (args.batch_size * world_size, 8), generator=generator)
        labels = (ids.sum(dim=1) % 7 > 3).long()
        rows = slice(dp_rank * args.batch_size, (dp_rank + 1) * args.batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[rows]), labels[rows])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world_size:.8f} norm {norm.item():.8f}")

    with torch.no_grad():
        ids = torch.randint(0, 40, (32, 8), generator=generator)
        final = F.cross_entropy(model(ids), (ids.sum(dim=1) % 7 > 3).long())
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
