"""Opacus cannot train a LayerNorm without bias: python this.py

compute_layer_norm_grad_sample (opacus/grad_sample/layer_norm.py) asks layer.bias.requires_grad, where
nn.LayerNorm(bias=False) has None.
"""

import sys

import torch
from opacus import GradSampleModule
from torch import nn

layer = nn.LayerNorm(2, bias=False)
inputs = torch.tensor([[1.0, 2.0], [3.0, -5.0]])
wanted = [torch.autograd.grad(layer(sample).square().sum(), layer.weight)[0] for sample in inputs]
print("wanted:", torch.stack(wanted).tolist(), flush=True)
private = GradSampleModule(layer, loss_reduction="sum")
private(inputs).square().sum().backward()
print("got:", layer.weight.grad_sample.tolist())
sys.exit(not torch.allclose(layer.weight.grad_sample, torch.stack(wanted)))
