"""Train a small GAN: two models with DistributedDataParallel, two optimizers.

torchrun --nproc-per-node 4 gan.py --batch-size 6 --steps 5
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LATENT = 6


def generator_net():
    return nn.Sequential(
        nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)
    )


def discriminator_net():
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


class Rings:
    """Points on a ring and latent noise of the global batch of each step; a rank sees its part."""

    def __init__(self, seed, batch_size, rank, world_size):
        self.random = torch.Generator().manual_seed(seed)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size

    def _mine(self, rows):
        return rows[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]

    def real(self):
        angle = torch.rand(self.batch_size * self.world_size, generator=self.random) * 6.2831853
        radius = 1 + 0.1 * torch.randn(self.batch_size * self.world_size, generator=self.random)
        return self._mine(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))

    def noise(self):
        return self._mine(torch.randn(self.batch_size * self.world_size, LATENT, generator=self.random))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr-g", type=float, default=2e-3)
    parser.add_argument("--lr-d", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    generator, discriminator = DDP(generator_net()), DDP(discriminator_net())
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr_g, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr_d, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    rings = Rings(args.seed + 2, args.batch_size, rank, world_size)
    ones, zeros = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)

    for step in range(args.steps):
        real, noise = rings.real(), rings.noise()

        # The discriminator, on real and made points.
        optimizer_d.zero_grad()
        made = generator(noise)
        scores = discriminator(torch.cat([real, made.detach()]))
        loss_d = criterion(scores, torch.cat([ones, zeros]))
        loss_d.backward()
        optimizer_d.step()

        # The generator, through the discriminator that has just moved.
        optimizer_g.zero_grad()
        for parameter in discriminator.parameters():
            parameter.requires_grad_(False)
        loss_g = criterion(discriminator.module(made), ones)
        loss_g.backward()
        optimizer_g.step()
        for parameter in discriminator.parameters():
            parameter.requires_grad_(True)

        shown = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(shown)
        shown /= world_size
        if rank == 0:
            print(f"step {step} discriminator {shown[0].item():.8f} generator {shown[1].item():.8f}")

    with torch.no_grad():
        points = generator.module(torch.linspace(-2, 2, 10 * LATENT).view(10, LATENT))
    if rank == 0:
        print(f"final mean radius {points.norm(dim=1).mean().item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
