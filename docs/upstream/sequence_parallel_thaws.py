"""SequenceParallel trains norms that were frozen: torchrun --nproc-per-node 2 this.py

It makes new parameters, and a new nn.Parameter requires a gradient. Ends with code 0 where frozen ones stay frozen.
"""

import os
import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": SequenceParallel()})
trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
print(f"parameters that are trained, of frozen ones: got {trained}, wanted []", flush=True)
dist.destroy_process_group()
if trained:
    raise RuntimeError(f"SequenceParallel thawed {trained}")
