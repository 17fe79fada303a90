"""FSDP1 on one shard loses the first gradient of what was thawed: python this.py

A micro-batch under no_sync and one without it, before the thaw and behind it: behind it the gradient of the first of
them is lost, once. Ends with code 0 where the two gradients are added up.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
model = nn.Sequential(frozen, nn.Linear(1, 1, bias=False))
nn.init.ones_(model[1].weight)
model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def step():
    model.zero_grad()
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()


step()
model.requires_grad_()
step()
got = frozen.weight.grad.item()
print(f"gradient of two micro-batches of 1 each: got {got}, wanted 2.0", flush=True)
dist.destroy_process_group()
if got != 2.0:
    raise RuntimeError("the gradient of the first micro-batch is lost")
