"""Opacus' loss_reduction="sum" over FSDP2 gives 1/W of the sum: torchrun --nproc-per-node 2 this.py

fully_shard averages gradients over ranks, and nothing multiplies by W again. For "mean" alone
FSDPOptimizerFastGradientClipping.add_noise divides the noise by W: with "sum" it is W times too large beside the rest.
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
model = nn.Sequential(nn.Linear(1, 2, bias=False))
nn.init.zeros_(model[0].weight)
module = FSDP2Wrapper(model)
data = TensorDataset(torch.full((2, 1), 2.0), torch.tensor([1, 1]))
private, optimizer, criterion, _ = PrivacyEngine().make_private(
    module=module,
    optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    criterion=nn.CrossEntropyLoss(reduction="sum"),
    data_loader=DataLoader(data, batch_size=2),
    noise_multiplier=0.0,
    max_grad_norm=1024.0,  # nothing is clipped
    loss_reduction="sum",
    poisson_sampling=False,
    grad_sample_mode="ghost_fsdp",
)
own = slice(dist.get_rank(), dist.get_rank() + 1)
criterion(private(data[own][0]), data[own][1]).backward()
optimizer.step()
got, wanted = model[0].weight.grad.full_tensor().flatten().tolist(), [2.0, -2.0]
if dist.get_rank() == 0:
    print(f"gradient of the sum over two samples, each with gradient [1, -1]: got {got}, wanted {wanted}", flush=True)
dist.destroy_process_group()
sys.exit(got != wanted)
