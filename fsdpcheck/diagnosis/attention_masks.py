"""Causes of a wrong norm of attention with masks: it is run again to find its gradients, and some mask is left out.

Legend: n samples, T positions, d features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.case.model import Mask
from fsdpcheck.diagnosis.layer_calls import Seen
from fsdpcheck.workload.layers import SelfAttention

_LESS: Final[dict[Mask, dict[Mask, str]]] = {
    "none": {},
    "causal": {"none": "its mask of later positions"},
    "keys": {"none": "its mask of keys"},
    "both": {"none": "its masks", "causal": "its mask of keys", "keys": "its mask of later positions"},
}
"""For each form of masks what is left if some are left out, and which they are."""


def left_out(layer: Seen, module: SelfAttention) -> Iterator[tuple[str, str, Tensor]]:
    """(key, text, what is added to the squared gradient norms [n] of all that the layer trains)."""
    whole = module.mask
    right_n = _squared_norms(layer)
    try:
        for module.mask, what in _LESS[whole].items():
            text = f"attention is run again without {what}, where its gradients are found"
            yield f"attention: without {what}", text, _squared_norms(layer) - right_n
    finally:
        module.mask = whole


def _squared_norms(layer: Seen) -> Tensor:
    """[n]: of each sample by itself."""
    module, x_nTd, g_nTd = layer.module, layer.activations, layer.backprops
    trained = [module.get_parameter(name) for name in layer.trains]
    found = []
    for x_1Td, g_1Td in zip(x_nTd[:, None], g_nTd[:, None], strict=True):
        gradients = torch.autograd.grad(module(x_1Td), trained, g_1Td)
        found.append(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
    return torch.stack(found)
