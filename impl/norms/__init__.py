"""Norm rules: per-sample gradients and their squared norms from activations and backprops, one layer type a file.

A rule is a module of this folder with three names: ``LAYER``, the exact layer type; ``squared_norm(module, activations,
backprops) -> [B]``, the squared norm of each sample's gradient with respect to the layer's *trainable* parameters; and
``per_sample_gradient(module, activations, backprops) -> {attribute: [B, *shape]}``, those gradients themselves. An
optional ``refusal(module) -> str`` says why a particular layer is not covered ("" when it is). Adding a layer type is
adding a file.

Legend: B samples, T positions of a sequence, d input features, p output features. ``activations`` is the layer's input,
``backprops`` the gradient of the summed per-sample losses with respect to its output; sample axis first.

Source: ghost clipping, Li et al. 2021, arXiv:2110.05679; for T = 1, Goodfellow 2015, arXiv:1510.01799.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from torch import nn


@cache
def rules() -> dict[type[nn.Module], ModuleType]:
    """Every rule of this folder by layer type. Raises RuntimeError if two files claim one type."""
    found: dict[type[nn.Module], ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        rule = importlib.import_module(f"{__name__}.{info.name}")
        if rule.LAYER in found:
            raise RuntimeError(f"{rule.__name__} and {found[rule.LAYER].__name__} both cover {rule.LAYER.__name__}")
        found[rule.LAYER] = rule
    return found


def rule_for(module: nn.Module) -> ModuleType | None:
    """The rule of exactly this layer type; subclasses may compute something else and have none."""
    return rules().get(type(module))
