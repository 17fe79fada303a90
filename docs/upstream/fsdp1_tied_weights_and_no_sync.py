"""FullyShardedDataParallel with one shard, tied weights, mixed precision and no_sync raises: python this.py

Under no_sync gradients stay in param_dtype. FlatParamHandle._use_sharded_grad_views (torch/distributed/fsdp/
_flat_param.py) gives the first name of a tied parameter its gradient by way of .data, where the dtypes may differ, and
further names without it: "attempting to assign a gradient with dtype 'c10::BFloat16' ...". NO_SHARD does the like.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for tied in (False, True):
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in layers:
        nn.init.ones_(layer.weight)
    if tied:
        layers[1].weight = layers[0].weight
    model = FullyShardedDataParallel(
        layers,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    wanted = 4.0 if tied else 2.0
    print(f"tied {tied}: wanted the gradient {wanted} of two micro-batches", flush=True)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    got = layers[0].weight.grad.item()
    print(f"tied {tied}: got {got}", flush=True)
dist.destroy_process_group()
sys.exit(got != wanted)
