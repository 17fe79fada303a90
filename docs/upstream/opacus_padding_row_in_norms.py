"""Opacus' ghost clipping counts the padding row of an Embedding in the norms of samples: python this.py

nn.Embedding(padding_idx=0) has no gradient for row 0; compute_embedding_norm_sample (opacus/grad_sample/
embedding_norm_sample.py) adds up the row as any other. So samples with padding are clipped too much.
"""

import sys

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn

layer = nn.Embedding(3, 1, padding_idx=0)
tokens = torch.tensor([[0, 0, 1], [1, 2, 2]])  # the first sample has two positions of padding
wanted = [torch.autograd.grad(layer(sample).sum(), layer.weight)[0].norm() for sample in tokens]
private = GradSampleModuleFastGradientClipping(layer, loss_reduction="sum")
private(tokens).sum().backward()
got = private.get_norm_sample()
print(f"norms of the samples: got {got.tolist()}, wanted {torch.stack(wanted).tolist()}")
sys.exit(not torch.allclose(got, torch.stack(wanted)))
