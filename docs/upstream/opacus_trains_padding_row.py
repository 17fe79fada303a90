"""Opacus by hooks trains the padding row of an Embedding: python this.py

nn.Embedding(padding_idx=0) gives row 0 no gradient. The gradients of samples that Opacus makes have one. It counts in
their norms, and the optimizer moves the row.
"""

import sys
import warnings

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

warnings.simplefilter("ignore")


def moved(private: bool) -> float:
    """How far one step of SGD moves the padding row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 1))
    before = model[0].weight[0].detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    called = GradSampleModule(model) if private else model
    if private:
        optimizer = DPOptimizer(optimizer, noise_multiplier=0.0, max_grad_norm=1e3, expected_batch_size=1)
    called(torch.tensor([[0, 1]])).sum().backward()
    optimizer.step()
    return float((model[0].weight[0] - before).abs().max())


plain, private = moved(False), moved(True)
print(f"the padding row moved in private training that clips nothing: got {private}, wanted {plain}")
sys.exit(private != plain)
