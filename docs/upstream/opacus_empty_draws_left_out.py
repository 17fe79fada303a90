"""Opacus' Poisson sampler of several ranks leaves out steps in which a rank draws nothing: python this.py

DistributedUniformWithReplacementSampler (opacus/utils/uniform_sampler.py) yields no batch then;
UniformWithReplacementSampler yields an empty one. The rank takes fewer steps than the others, which wait for it in the
collectives of their last steps, and the noise of a step without samples is never added. make_private takes this sampler
for FSDP2 modules on one rank too.
"""

import sys

import torch
import torch.distributed as dist
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
single = UniformWithReplacementSampler(
    num_samples=1, sample_rate=0.5, steps=16, generator=torch.Generator().manual_seed(0)
)
several = DistributedUniformWithReplacementSampler(
    total_size=1, sample_rate=0.5, steps=16, generator=torch.Generator().manual_seed(0)
)
wanted, got = len(list(single)), len(list(several))
print(f"steps of 16 on one record drawn with probability 1/2: got {got}, wanted {wanted}")
dist.destroy_process_group()
sys.exit(got != wanted)
