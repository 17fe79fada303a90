"""The layers whose norms make up a sample's norm, each with its rule, or an error that says why there is no answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from torch import nn

from . import norms
from .aggregate import Contribution
from .norms import fallback
from .records import Layer
from .sharded import Sharded


def layers_of(model: Sharded, contribution: str) -> list[Layer]:
    """The layers whose norms make up a sample's norm, or an error that says why there is no right answer.

    ``contribution``: "complete", "partial", or "mixed" (inner units partial, the root's own parameters complete).
    """
    canonical = {(id(slot.module), slot.attribute): uses[0].name for uses in model.places for slot in uses}
    layers: list[Layer] = []
    covered: set[int] = set()
    for name, module in model.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise NotImplementedError(
                f"{name} is a {norms.layer_type(module).__name__}: it mixes the samples of a batch, none of which has a"
                " gradient of its own then; use GroupNorm or LayerNorm"
            )
        if id(module) in covered:
            continue
        rule = norms.rule_for(module) or fallback
        whole = getattr(rule, "COVERS_CHILDREN", False)
        own = _trainable(module, canonical, whole)
        if own:
            _refuse(name, module, rule, model)
            contributions = {at: _contribution(model, wanted, contribution) for at, wanted in own.items()}
            layers.append(Layer(name, module, rule, model, own, contributions))
            covered |= {id(child) for child in module.modules()} if whole else set()
    return layers


def _trainable(module: nn.Module, canonical: Mapping[tuple[int, str], str], whole: bool) -> dict[str, str]:
    """{attribute, dotted if it belongs to a child: canonical name} of what the layer answers for."""
    found = {}
    for attribute, value in module.named_parameters(recurse=whole):
        if value.requires_grad:
            path, _, last = attribute.rpartition(".")
            found[attribute] = canonical[id(module.get_submodule(path)), last]
    return found


def _held_twice(module: nn.Module, whole: bool) -> tuple[str, str] | None:
    """Two attributes of the layer that hold one trainable parameter, or None."""
    first: dict[int, str] = {}
    for attribute, value in module.named_parameters(recurse=whole, remove_duplicate=False):
        if value.requires_grad and first.setdefault(id(value), attribute) != attribute:
            return first[id(value)], attribute
    return None


def _contribution(model: Sharded, name: str, contribution: str) -> Contribution:
    return (
        "partial" if contribution == "partial" or (contribution == "mixed" and not model.in_root(name)) else "complete"
    )


def _refuse(name: str, module: nn.Module, rule: ModuleType, model: Sharded) -> None:
    """Raise NotImplementedError for a layer that its rule does not cover."""
    where = name or "(root)"
    if reason := getattr(rule, "refusal", lambda _: "")(module):
        raise NotImplementedError(f"{where}: {reason}")
    if rule is not fallback and (twice := _held_twice(module, getattr(rule, "COVERS_CHILDREN", False))):
        raise NotImplementedError(
            f"{where}: {twice[0]} and {twice[1]} are one parameter, and the norm rule of"
            f" {norms.layer_type(module).__name__} does not know their sum; give each a parameter of its own"
        )
    units = [below for below, child in module.named_modules() if child is not module and model.is_unit(child)]
    if units and getattr(rule, "NEEDS_PARAMETERS", False):
        raise NotImplementedError(
            f"{where} is a {type(module).__name__} that holds parameters itself and has no norm rule: its forward is "
            f"run again inside the backward, for which {', '.join(units)} in it would have to be gathered; put its own "
            "parameters into a module of their own, whose forward uses them"
        )
