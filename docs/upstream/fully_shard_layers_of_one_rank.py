"""fully_shard sends buffers of other sizes where ranks use other layers: torchrun --nproc-per-node 2 this.py

Of a unit only parameters with a gradient are reduced. Where a rank's samples leave a layer out, as tokens choose
experts, its reduce-scatter is smaller than that of the others. gloo raises, or takes the wrong bytes for gradients.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.set_debug_level(dist.DebugLevel.DETAIL)  # so that the two sizes are compared
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, chosen: bool) -> torch.Tensor:
        hidden = self.shared(inputs)
        return self.expert(hidden) if chosen else hidden


for only_rank_0 in (False, True):
    model = Experts()
    fully_shard(model, mesh=mesh)
    users = "rank 0 alone" if only_rank_0 else "all ranks"
    print(f"an expert that {users} used: wanted a backward", flush=True)
    model(torch.ones(1, 4), chosen=not only_rank_0 or dist.get_rank() == 0).sum().backward()
    print(f"an expert that {users} used: got a backward", flush=True)
dist.destroy_process_group()
