"""Opacus cannot train an EmbeddingBag on bags of two dimensions: python this.py

nn.EmbeddingBag takes [B, T] indices, a bag a row, without offsets. compute_embeddingbag_gradsampler
(opacus/grad_sample/embedding.py) unpacks (input, offsets) whatever was given.
"""

import sys

import torch
from opacus import GradSampleModule
from torch import nn

layer = nn.EmbeddingBag(3, 2, mode="sum")
bags = torch.tensor([[0, 1], [2, 2]])
wanted = torch.tensor([[[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]])
print("wanted:", wanted.tolist(), flush=True)
private = GradSampleModule(layer, loss_reduction="sum")
private(bags).sum().backward()
print("got:", layer.weight.grad_sample.tolist())
sys.exit(not torch.equal(layer.weight.grad_sample, wanted))
