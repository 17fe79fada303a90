"""FullyShardedDataParallel raises where a frozen module gives its input as it is: python this.py

A module that is left out for some inputs returns what it was given. With nothing to train in it, FSDP1 puts a hook of
after its backward on its input, and a hook of before its backward on its output. Here both are one tensor, and the
hook of after runs first: it leaves the state in which the other does not expect it. Trained, the module is fine.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class LeftOut(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x


def sharded(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def gradient(trained: bool) -> float:
    """Of the layer before it, which has the weight 1; what comes behind is 2."""
    first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(last.weight, 2.0)
    left_out = LeftOut(1, 1).requires_grad_(trained)
    model = sharded(nn.Sequential(sharded(first), sharded(left_out), sharded(last)))
    model(torch.ones(1, 1)).sum().backward()
    assert first.weight.grad is not None
    return float(first.weight.grad)


for trained in (True, False):
    try:
        got = str(gradient(trained))
    except ValueError as error:
        got = f"ValueError: {error}"
    print(f"gradient of the layer before a module that is {'trained' if trained else 'frozen'}: got {got}, wanted 2.0")
dist.destroy_process_group()
sys.exit(got != "2.0")
