"""FullyShardedDataParallel fires backward hooks of modules in which nothing is trained: python this.py

With use_orig_params=True the frozen weight is a view of the unit's one flat parameter, which needs a gradient. So
autograd gives the frozen module a backward, computes a gradient that is dropped, and fires the hooks that a user has
put on it. PyTorch warns of the memory that this takes, and not of the hooks.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def fired(sharded: bool) -> int:
    """How often the hook of the frozen module fires in a backward."""
    calls: list[nn.Module] = []
    frozen, trained = nn.Linear(2, 2, bias=False).requires_grad_(False), nn.Linear(2, 1)
    frozen.register_full_backward_hook(lambda module, inputs, outputs: calls.append(module))
    model: nn.Module = nn.Sequential(frozen, trained)
    if sharded:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(1, 2)).sum().backward()
    return len(calls)


got, wanted = fired(sharded=True), fired(sharded=False)
print(f"calls of the frozen module's full_backward hook: got {got}, wanted {wanted}")
dist.destroy_process_group()
sys.exit(got != wanted)
