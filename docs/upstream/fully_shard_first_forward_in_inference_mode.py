"""fully_shard cannot train behind a first forward in inference mode: torchrun --nproc-per-node 2 this.py

The buffers that it gathers into are made by the first forward. In torch.inference_mode they are inference tensors, and
stay so: the first training step raises. Behind torch.no_grad, or behind a first training step, nothing is wrong.
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
for context in (torch.no_grad, torch.inference_mode):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=mesh)
    with context():
        model(torch.ones(1, 3))
    print(f"behind {context.__name__}: wanted a backward", flush=True)
    model(torch.ones(1, 3)).sum().backward()
    print(f"behind {context.__name__}: got a backward", flush=True)
dist.destroy_process_group()
