"""FullyShardedDataParallel.clip_grad_norm_ raises for a float64 model: torchrun --nproc-per-node 2 this.py

Its docstring promises a norm of the largest dtype among the gradients. _get_grad_norm (fully_sharded_data_parallel.py)
takes every norm with dtype=torch.float32, and vector_norm refuses to narrow float64. Nothing is wrong on one rank.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
wanted = torch.tensor(4.0, dtype=torch.float64)  # of 16 gradients that are 1
for dtype in (torch.float32, torch.float64):
    model = FullyShardedDataParallel(nn.Linear(4, 4, bias=False).to(dtype), device_id=torch.device("cpu"))
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    print(f"{dtype}: wanted {wanted.to(dtype)}", flush=True)
    norm = model.clip_grad_norm_(1.0)
    print(f"{dtype}: got {norm}", flush=True)
dist.destroy_process_group()
sys.exit(norm.dtype != wanted.dtype or not torch.allclose(norm, wanted))
