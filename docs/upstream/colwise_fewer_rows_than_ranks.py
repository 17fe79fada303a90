"""ColwiseParallel with fewer outputs than ranks cannot be trained: torchrun --nproc-per-node 2 this.py

The gradient of the weight, Shard(0), comes back as Replicate, and the optimizer's update in place is refused.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for outputs in (2, 1):
    layer = parallelize_module(nn.Linear(3, outputs, bias=False), mesh, ColwiseParallel(output_layouts=Replicate()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(torch.ones(2, 3)).sum().backward()
    got, wanted = layer.weight.grad.placements, layer.weight.placements
    print(f"{outputs} outputs, placement of the gradient: got {got}, wanted {wanted}", flush=True)
    optimizer.step()
