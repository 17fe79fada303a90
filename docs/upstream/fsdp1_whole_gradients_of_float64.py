"""FullyShardedDataParallel.summon_full_params(with_grads=True) fails for float64: torchrun --nproc-per-node 2 this.py

FlatParamHandle.unshard_grad (torch/distributed/fsdp/_flat_param.py) gathers shards of a gradient. A rank whose shard
has none, as where it is frozen, sends torch.zeros of the default dtype, and the others gradients of their own dtype.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.set_debug_level(dist.DebugLevel.DETAIL)  # so that the two dtypes are compared
dist.init_process_group("gloo")
for dtype in (torch.float32, torch.float64):
    frozen, trained = nn.Linear(2, 2, bias=False).requires_grad_(False), nn.Linear(2, 2, bias=False)
    nn.init.eye_(frozen.weight)
    model = FullyShardedDataParallel(
        nn.Sequential(frozen, trained).to(dtype), device_id=torch.device("cpu"), use_orig_params=True
    )
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    print(f"{dtype}: wanted a gradient of ones", flush=True)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        print(f"{dtype}: got {trained.weight.grad}", flush=True)
dist.destroy_process_group()
