"""On one shard a weight of two wrapped modules loses the gradient of one of them, in silence: python this.py

Each module flattens the weight into a parameter of its own. On several shards the second one meets what the first has
made of it, and its forward raises "size mismatch". With one shard a rank (W = 1, or NO_SHARD) the shapes fit. Where
gradients are None before the backward, as zero_grad leaves them, one of the two is lost; where they are zeros, none is.
FSDP2 refuses such a weight (FSDPState._validate_no_duplicate_params).
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inner = [nn.Linear(1, 1, bias=False) for _ in range(3)]
inner[1].weight = inner[0].weight
for one in inner:
    nn.init.constant_(one.weight, 3.0)
options = {"device_id": torch.device("cpu"), "use_orig_params": True}
units = [FullyShardedDataParallel(one, **options) for one in inner]
model = FullyShardedDataParallel(nn.Sequential(*units), **options)
model(torch.ones(1, 1)).sum().backward()  # the output is w * w * v, so the gradient of w is 2 * w * v
got, wanted = next(model.parameters()).grad.item(), 18.0
print(f"gradient of the weight that two units share: got {got}, wanted {wanted}", flush=True)
dist.destroy_process_group()
sys.exit(got != wanted)
