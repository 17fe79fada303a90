"""The largest value of a DTensor raises on a rank with an empty shard: torchrun --nproc-per-node 2 this.py

fully_shard gives ranks an empty shard of a parameter that has fewer rows than ranks. ``max``, ``min``, ``amax`` and the
infinity norm reduce each shard first, and have no value for nothing: that rank raises, the others wait for it for ever.
Sums and the 2-norm have a zero there.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
model = nn.Linear(4, 1, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
model(torch.ones(2, 4)).sum().backward()
gradient = model.weight.grad
assert gradient is not None
met = []
for name, reduce in {
    "norm(2)": lambda value: torch.linalg.vector_norm(value),
    "norm(inf)": lambda value: torch.linalg.vector_norm(value, float("inf")),
    "max()": Tensor.max,
    "min()": Tensor.min,
    "amax()": Tensor.amax,
}.items():
    said = "a value"
    try:
        reduce(gradient)  # not read: rank 0 would wait
    except RuntimeError as error:
        said = f"RuntimeError: {error}"
    everyone = [""] * 2
    dist.all_gather_object(everyone, said)
    met += everyone
    if dist.get_rank() == 0:
        print(f"{name}: got {everyone[0]!r} on rank 0, {everyone[1]!r} on rank 1; wanted 'a value' on both", flush=True)
dist.destroy_process_group()
sys.exit(set(met) != {"a value"})
