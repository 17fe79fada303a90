"""Norm rules: per-sample gradients and their squared norms from activations and backprops, one layer type a file.

A rule is a module of this folder with these names:

* ``LAYER``: the exact layer type, or a tuple of types.
* ``squared_norm(module, activations, backprops) -> [B]``: the squared norm of each sample's gradient with respect to
  the layer's *trainable* parameters.
* ``per_sample_gradient(module, activations, backprops) -> {attribute: [B, *shape]}``: those gradients themselves.
* ``weighted_gradient(module, activations, backprops, weights_B) -> {attribute: [*shape]}``: their sum weighted by
  ``weights_B`` [B], without forming them: backprops are scaled by the weights, then contracted as in a backward pass.
* optional ``flash_squared_norm(module, activations, backprops) -> [B]``: the same by the kernels of ``kernels``.
* optional ``refusal(module) -> str``: why a particular layer is not covered ("" when it is).
* optional ``PARAMETERS``: names of all parameters that it knows; without, weight and bias.

A rule needs activations, backprops and options of the layer only, never the values of its parameters, unless it says
``NEEDS_PARAMETERS = True``; then it has to be called while the layer's unit is gathered. ``COVERS_CHILDREN = True``
says that the rule's attributes are dotted names of *all* parameters below the layer, whose children have no rule of
their own. ``products(module, activations, backprops)`` may give such a rule ``_products.Products`` to be called with
from then on, in place of activations and without parameters; otherwise its per-sample gradients are formed at once.
``ONE_INPUT`` may say what the one input is, for the error of a call with more; ``call(positional,
keywords)`` makes a ``fallback.Call`` where a rule takes several. A layer type without a file is taken by ``fallback``,
and a type is matched exactly: a subclass may compute something else. Adding a layer type is adding a file; names that
begin with "_" are no rules.

Legend: B samples, T positions of a sequence, d input features, p output features. ``activations`` is the layer's input,
``backprops`` the gradient of the summed per-sample losses with respect to its output; sample axis first.

Source: ghost clipping, Li et al. 2021, arXiv:2110.05679; for T = 1, Goodfellow 2015, arXiv:1510.01799; clipping from
cached activations and backprops, Bu et al. 2022 (book-keeping), arXiv:2210.00038.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from torch import nn
from torch.distributed.fsdp import FSDPModule


@cache
def rules() -> dict[type[nn.Module], ModuleType]:
    """Every rule of this folder by layer type. Raises RuntimeError if two files claim one type."""
    found: dict[type[nn.Module], ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        rule = importlib.import_module(f"{__name__}.{info.name}")
        for layer in rule.LAYER if isinstance(rule.LAYER, tuple) else (rule.LAYER,):
            if layer in found:
                raise RuntimeError(f"{rule.__name__} and {found[layer].__name__} both cover {layer.__name__}")
            found[layer] = rule
    return found


def rule_for(module: nn.Module) -> ModuleType | None:
    """The rule of exactly this layer type; a subclass, or a forward of its own, may compute something else: none."""
    return None if "forward" in vars(module) else rules().get(layer_type(module))


def layer_type(module: nn.Module) -> type[nn.Module]:
    """The type that a layer was made as: ``fully_shard`` puts a class of its own, FSDP<type>, before it."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0] is FSDPModule else type(module)
