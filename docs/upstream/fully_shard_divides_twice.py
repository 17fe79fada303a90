"""FSDPModule.set_gradient_divide_factor(f) divides by f twice where there is one shard: python this.py

foreach_reduce (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) divides by gradient_divide_factor where it
has nothing to reduce-scatter, and before and after by predivide_factor and postdivide_factor, whose product is f too,
but for float32 and bfloat16, where they are None. A mesh (n, 1) of replicas does the like.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, wrong = init_device_mesh("cpu", (1,)), False
for dtype in (torch.float32, torch.float64, torch.float16):
    for factor in (1.0, 2.0, 4.0):
        model = fully_shard(nn.Linear(1, 1, bias=False, dtype=dtype), mesh=mesh)
        model.set_gradient_divide_factor(factor)
        model(torch.full((1, 1), 16.0, dtype=dtype)).sum().backward()
        got, wanted = model.weight.grad.full_tensor().item(), 16.0 / factor
        print(f"gradient 16 in {dtype}, divide factor {factor}: got {got}, wanted {wanted}", flush=True)
        wrong |= got != wanted
dist.destroy_process_group()
sys.exit(wrong)
