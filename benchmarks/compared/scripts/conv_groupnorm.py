"""Train a convolutional net with GroupNorm; the augmentation of an image is drawn from its index and epoch.

torchrun --nproc-per-node 4 conv_groupnorm.py --batch-size 3 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Blobs(Dataset):
    """Images of one bright spot; the label is the quarter that has it."""

    def __init__(self, size, seed):
        self.size, self.seed, self.epoch = size, seed, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        row, column = torch.randint(0, 8, (2,), generator=generator).tolist()
        image = 0.2 * torch.randn(3, 8, 8, generator=generator)
        image[:, row, column] += 2
        return self.augment(image, index), 2 * (row > 3) + (column > 3)

    def augment(self, image, index):
        generator = torch.Generator().manual_seed(self.seed + 31 * self.epoch + 1009 * index)
        gain = 1 + 0.3 * (torch.rand((), generator=generator) - 0.5)
        noise = 0.05 * torch.randn(image.shape, generator=generator)
        return gain * image + noise


def conv_net(classes):
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1).to(memory_format=torch.channels_last),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    dataset = Blobs(args.batch_size * world_size * args.steps, args.seed)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(conv_net(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

    seen = correct = 0
    for step, (images, labels) in enumerate(loader):
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=args.smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts = torch.tensor([float((logits.argmax(dim=1) == labels).sum()), len(labels), loss.item()])
        dist.all_reduce(counts)
        correct, seen = correct + counts[0].item(), seen + counts[1].item()
        if rank == 0:
            print(f"step {step} loss {counts[2].item() / world_size:.8f} accuracy {correct / seen:.3f}")

    held_out = Blobs(40, args.seed + 1)
    with torch.no_grad():
        images = torch.stack([held_out[i][0] for i in range(40)])
        final = nn.functional.cross_entropy(model.module(images), torch.tensor([held_out[i][1] for i in range(40)]))
    if rank == 0:
        print(f"final evaluation loss {final.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
