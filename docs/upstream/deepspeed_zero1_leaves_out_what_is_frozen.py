"""A ZeRO-1 checkpoint that zero_to_fp32 reads lacks the frozen parameters: python this.py

save_checkpoint (deepspeed/runtime/engine.py) puts what is frozen where zero_to_fp32 looks for it only if gradients are
partitioned, which is ZeRO-2 and 3. load_state_dict_from_zero_checkpoint loads what there is with strict=False: a model
that it fills keeps its own frozen weights, without a word.
"""

import os
import sys
import tempfile

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled


def made(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, value)
    model[0].requires_grad_(False)
    return model


def read(stage: int) -> list[float]:
    """Weights of a model of zeros that was filled from the checkpoint of one of ones: frozen, trained."""
    model = made(1.0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
              "zero_allow_untested_optimizer": True}  # fmt: skip
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    filled = made(0.0)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        load_state_dict_from_zero_checkpoint(filled, folder, "saved")
    return [float(weight.detach()) for weight in filled.parameters()]


for stage in (2, 1):
    got = read(stage)
    print(f"ZeRO-{stage}, frozen and trained weight: got {got}, wanted [1.0, 1.0]", flush=True)
dist.destroy_process_group()
sys.exit(got != [1.0, 1.0])
