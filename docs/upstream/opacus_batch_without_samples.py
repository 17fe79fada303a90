"""Opacus' ghost clipping over FSDP2 raises on a batch without samples: python this.py

Poisson sampling draws such batches. Norms of gradients are taken by reshape(0, -1), which is refused; without FSDP2
create_norm_sample provides for it, but GradSampleHooksFastGradientClippingFSDP does not. A convolution has one norm for
no samples, which does not stack with the others. compute_embedding_norm_sample takes reshape(0, -1) of the indices. On
several ranks the one without samples raises alone, and the others wait for it.
"""

import sys

import torch
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import GradSampleModuleFastGradientClippingFSDP
from torch import nn

NO_SAMPLES = torch.empty(0, 2, 4)
CASES = {
    "Linear": (nn.Linear(4, 4), NO_SAMPLES),
    "Conv1d": (nn.Conv1d(2, 2, 1), NO_SAMPLES),
    "LayerNorm": (nn.LayerNorm(4), NO_SAMPLES),
    "RMSNorm": (nn.RMSNorm(4), NO_SAMPLES),
    "GroupNorm": (nn.GroupNorm(1, 2), NO_SAMPLES),
    "Embedding": (nn.Embedding(3, 2), torch.empty(0, 4, dtype=torch.int64)),
}
failed = []
for name, (layer, inputs) in CASES.items():
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(8, 1))
    private = GradSampleModuleFastGradientClippingFSDP(model, loss_reduction="sum")  # needs no process group
    try:
        private(inputs).sum().backward()
        got = f"{len(private.get_norm_sample())} norms"
    except RuntimeError as error:
        got = f"RuntimeError: {error}"
    print(f"{name} and Linear: got {got}; wanted 0 norms", flush=True)
    failed += [] if got == "0 norms" else [name]
sys.exit(bool(failed))
