"""Opacus draws records of ranks that are seeded alike together: torchrun --nproc-per-node 2 this.py

DistributedUniformWithReplacementSampler (opacus/utils/uniform_sampler.py) draws from the generator that it is given,
and its rank has no part in it. With torch.manual_seed(0) on every rank, as a training script has it, the records of
the two ranks join a batch together or not at all: they are not drawn independently, as amplification by sampling asks.
"""

import os
import sys

import torch
import torch.distributed as dist
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
STEPS = 256
dist.init_process_group("gloo")
torch.manual_seed(0)
sampler = DistributedUniformWithReplacementSampler(total_size=2, sample_rate=0.5, steps=1)
drawn = torch.tensor([len(list(sampler)) for _ in range(STEPS)])  # 1 where this rank's record is drawn
of_ranks = [torch.empty_like(drawn) for _ in range(2)]
dist.all_gather(of_ranks, drawn)
alike = int((of_ranks[0] == of_ranks[1]).sum())
if dist.get_rank() == 0:
    print(f"of {STEPS} steps with two records, each drawn with probability 1/2 by a rank of its own:")
    print(f"steps in which both or none were drawn: got {alike}, wanted about {STEPS // 2}", flush=True)
dist.destroy_process_group()
sys.exit(alike == STEPS)
