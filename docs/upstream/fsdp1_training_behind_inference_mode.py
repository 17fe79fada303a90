"""FSDP1 cannot train behind a forward in inference mode: torchrun --nproc-per-node 2 this.py

What that forward gathers into is an inference tensor, and stays what the flat parameter has; the next forward finds no
node at which to register its hook. Behind torch.no_grad nothing is wrong. Ends with code 0 where both are right.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
for context in (torch.no_grad, torch.inference_mode):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with context():
        model(torch.ones(1, 2))
    print(f"behind {context.__name__}: wanted a backward", flush=True)
    model(torch.ones(1, 2)).sum().backward()
    print(f"behind {context.__name__}: got a backward", flush=True)
dist.destroy_process_group()
