"""FSDPModule.reset_iter_state raises where no forward has run yet: python this.py

It is offered for use after an exception, and one may come before the first forward, as from a data loader.
FSDPState._reset_iter_state reads self._comm_ctx.all_gather_state, which lazy_init makes in that forward.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(1, 1, bias=False), mesh=init_device_mesh("cpu", (1,)))
print("wanted: nothing to reset, and a gradient of 3.0", flush=True)
model.reset_iter_state()  # as a loop does behind any exception
model(torch.tensor([[3.0]])).sum().backward()
got = model.weight.grad.full_tensor().item()
print(f"got: a gradient of {got}")
dist.destroy_process_group()
sys.exit(got != 3.0)
