"""fully_shard freezes again what was thawed behind an evaluation: torchrun --nproc-per-node 2 this.py

The root keeps its parameters gathered behind a forward without gradients, so model.requires_grad_() thaws the gathered
ones alone. The next backward frees them, and what is registered again is the shard, frozen as before. Ends with code 0
where every step behind it has a gradient.
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
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
model(torch.ones(1, 2)).sum().backward()
with torch.no_grad():
    model(torch.ones(1, 2))
model.requires_grad_()
trained = []
for _ in range(3):
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    trained.append(model[0].weight.grad is not None)
print(f"steps with a gradient of what was thawed: got {trained}, wanted {[True] * 3}", flush=True)
dist.destroy_process_group()
if not all(trained):
    raise RuntimeError("what was thawed is frozen again")
