"""A Linear layer in tensor parallel never returns for a rank without samples: torchrun --nproc-per-node 2 this.py

Flattening a DTensor [0, 2, 2] to [0, 2], view_groups (torch/distributed/tensor/_ops/_view_ops.py) multiplies sizes
until two products are equal, and a product with a 0 in it stays 0.
"""

import faulthandler
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
faulthandler.dump_traceback_later(20, exit=True)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
layer = parallelize_module(nn.Linear(2, 4), mesh, ColwiseParallel())
for samples in (2, 0):
    print(f"{samples} samples: wanted an output of shape {(samples, 2, 2)}", flush=True)
    print(f"{samples} samples: got {tuple(layer(torch.ones(samples, 2, 2)).shape)}", flush=True)
