"""Opacus takes every convolution for one that is padded with zeros, so norms of samples are wrong: python this.py

padding_mode "reflect", "replicate" and "circular" pad with numbers of the input. The rule for convolutions pads with
zeros, and so forms norms of what the layer did not see, here too small. No validator refuses such a layer.
"""

import sys

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.validators import ModuleValidator
from torch import nn

layer = nn.Conv1d(1, 1, kernel_size=2, padding=1, padding_mode="circular", bias=False)
signals = torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]], requires_grad=True)
errors = ModuleValidator.validate(layer)
wanted = [torch.autograd.grad(layer(signal[None])[0, 0, 0], layer.weight)[0].norm().item() for signal in signals]
private = GradSampleModuleFastGradientClipping(layer, loss_reduction="sum")
private(signals)[:, 0, 0].sum().backward()
got = private.get_norm_sample().tolist()
print(f"errors of the validator: {errors}; norms of the samples: got {got}, wanted {wanted}")
sys.exit(got != wanted)
