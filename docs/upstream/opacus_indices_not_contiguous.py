"""Opacus' ghost clipping raises for Embedding indices that are no contiguous tensor: python this.py

torch.arange(T).expand(B, T), positions as many models make them, is such a tensor, and autograd takes it.
compute_embedding_norm_sample (opacus/grad_sample/embedding_norm_sample.py) takes input_ids.view(-1, 1) of it.
"""

import sys

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn

layer = nn.Embedding(3, 1)
positions = torch.arange(3).expand(2, 3)
wanted = [torch.autograd.grad(layer(sample).sum(), layer.weight)[0].norm() for sample in positions]
print("wanted:", torch.stack(wanted).tolist(), flush=True)
private = GradSampleModuleFastGradientClipping(layer, loss_reduction="sum")
private(positions).sum().backward()
got = private.get_norm_sample()
print("got:", got.tolist())
sys.exit(not torch.allclose(got, torch.stack(wanted)))
