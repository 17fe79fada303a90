"""Opacus cannot train a layer with fewer rows than ranks over FSDP2: torchrun --nproc-per-node 2 this.py

FSDPOptimizerFastGradientClipping.add_noise adds noise, which is no DTensor, to a gradient, which is Shard(0). Their sum
is Replicate where the gradient has fewer rows than ranks: the optimizer's update in place of the sharded parameter is
refused. A head with one output is enough.
"""

import os
import sys

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
data = TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
for rows in (2, 1):
    module = FSDP2Wrapper(nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, 2)))
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost_fsdp",
    )
    inputs, targets = data[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    criterion(private(inputs), targets).backward()
    print(f"a Linear with {rows} rows on 2 ranks: wanted a step", flush=True)
    optimizer.step()
    print(f"a Linear with {rows} rows on 2 ranks: got a step", flush=True)
dist.destroy_process_group()
