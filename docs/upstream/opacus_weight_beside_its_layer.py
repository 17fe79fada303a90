"""Opacus' ghost clipping leaves a weight's use beside its layer out of the norms of samples: python this.py

Hooks see what a Linear is called with, and not that F.linear takes its weight once more, as a head that shares the
weight of an Embedding may. So norms are too small, and samples are clipped too little, in silence.
"""

import sys

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, inputs):
        return self.layer(inputs) + F.linear(inputs, self.layer.weight)


model, inputs = Model(), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
weight = model.layer.weight
wanted = [torch.autograd.grad(model(sample[None])[0, 0], weight)[0].norm().item() for sample in inputs]
private = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
private(inputs)[:, 0].sum().backward()
got = private.get_norm_sample().tolist()
print(f"norms of the samples: got {got}, wanted {wanted}")
sys.exit(got != wanted)
