"""HYBRID_SHARD on replicas of one shard each trains them apart, in silence: torchrun --nproc-per-node 2 this.py

On a mesh (n, 1) the group of shards has one rank. _init_core_state (torch/distributed/fsdp/_init_utils.py) makes the
strategy NO_SHARD, and _reduce_grad_no_shard (_runtime_utils.py) reduces over that group: nobody reduces over replicas.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    nn.Linear(1, 1, bias=False),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    device_id=torch.device("cpu"),
)
own = dist.get_rank() + 1.0
model(torch.tensor([[own]])).sum().backward()
got, wanted = next(model.parameters()).grad.item(), 1.5
print(f"gradient of rank {dist.get_rank()}, whose own is {own}: got {got}, wanted {wanted}, the mean", flush=True)
dist.destroy_process_group()
sys.exit(got != wanted)
