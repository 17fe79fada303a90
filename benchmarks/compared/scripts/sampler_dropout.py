"""Train with a shuffling DistributedSampler over several epochs, and dropout.

torchrun --nproc-per-node 4 sampler_dropout.py --batch-size 3 --epochs 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_dataset(seed, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 14, generator=generator)
    y = (x[:, ::2].sum(dim=1) > x[:, 1::2].sum(dim=1)).float()
    return TensorDataset(x, y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="per rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed + 9, 36)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(14, 40), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
        )
    )
    optimizer = torch.optim.NAdam(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
            shown = loss.detach() / world_size
            dist.all_reduce(shown)
            if rank == 0:
                print(f"epoch {epoch} loss {shown.item():.8f}")

    model.eval()
    x, y = make_dataset(args.seed + 10, 50).tensors
    with torch.no_grad():
        final = criterion(model.module(x).squeeze(1), y)
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
