"""FullyShardedDataParallel adds up micro-batches under no_sync in param_dtype, whatever reduce_dtype is: python this.py

Autograd adds to the gradient of the gathered parameters, which are bfloat16: 256 + 1 is 256 there. fully_shard adds up
in reduce_dtype (FSDPParam.to_accumulated_grad_if_needed), and so does FullyShardedDataParallel without no_sync.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

GRADIENTS = (256.0, 1.0, 1.0)  # of three micro-batches
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for with_no_sync in (False, True):
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    for number, gradient in enumerate(GRADIENTS):
        last = number == len(GRADIENTS) - 1
        with model.no_sync() if with_no_sync and not last else nullcontext():
            model(torch.tensor([[gradient]])).sum().backward()
    got, wanted = next(model.parameters()).grad.item(), sum(GRADIENTS)
    print(f"gradient {'with' if with_no_sync else 'without'} no_sync: got {got}, wanted {wanted}", flush=True)
dist.destroy_process_group()
sys.exit(got != wanted)
