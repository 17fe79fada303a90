"""FSDPModule.reset_iter_state keeps the unreduced gradients that it documents to discard: python this.py

Its docstring: "the failed iteration's gradients are lost, including ... no_sync grad-accumulation state". The gradient
of a micro-batch without gradient sync stays in .grad of the unsharded parameter, or with a reduce_dtype in
FSDPParam.unsharded_accumulated_grad, and FSDPParamGroup._reset_iter_state clears neither: the next step has it in it.
"""

import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, wrong = init_device_mesh("cpu", (1,)), False
for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=mesh, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 256.0)).sum().backward()
    with suppress(RuntimeError):
        model(torch.ones(1, 2))  # the second micro-batch: of a wrong shape
    model.reset_iter_state()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.full((1, 1), 4.0)).sum().backward()
    got, wanted = model.weight.grad.full_tensor().item(), 4.0
    print(f"gradient behind reset_iter_state, param_dtype {policy.param_dtype}: got {got}, wanted {wanted}", flush=True)
    wrong |= got != wanted
dist.destroy_process_group()
sys.exit(wrong)
