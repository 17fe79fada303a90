"""One step of a sharded model, as torchrun would start it: nothing of fsdpcheck is in it.

$ fsdpcheck simulate -n 2 --trace trace.json docs/examples/sharded_step.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
loss = model(torch.ones(4, 8)).square().mean()
loss.backward()
mean = loss.detach().clone()
dist.all_reduce(mean)
