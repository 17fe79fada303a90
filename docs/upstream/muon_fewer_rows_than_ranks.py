"""Muon cannot train a matrix with fewer rows than ranks under fully_shard: torchrun --nproc-per-node 2 this.py

fully_shard gives such ranks an empty shard. SGD and AdamW train it; Muon's update comes back as Replicate, which
add_ cannot take into a sharded parameter.
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
mesh = init_device_mesh("cpu", (2,))
for rows, make in ((1, torch.optim.SGD), (1, torch.optim.AdamW), (4, torch.optim.Muon), (1, torch.optim.Muon)):
    model = nn.Linear(4, rows, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(f"{make.__name__} trained a matrix of {rows} rows", flush=True)
dist.destroy_process_group()
