"""The layers whose norms make up a sample's norm, each with its rule, or an error that says why there is no answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .. import norms
from ..norms import fallback
from ..sharding.protocol import Sharded
from .norm_aggregation import Contribution
from .records import Layer

_IN_FORWARD = (
    "write a module of its own that holds them and computes the weight in its forward, such as"
    " F.linear(x, self.g * F.normalize(self.v, dim=1)), or fold them into the weight before wrapping"
)


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
            _refuse_parameters(name or "(root)", module, rule, own)
            contributions = {at: _contribution(model, wanted, contribution) for at, wanted in own.items()}
            layers.append(Layer(name, module, rule, model, own, contributions))
            covered |= {id(child) for child in module.modules()} if whole else set()
    return layers


def refuse_now(layer: Layer) -> None:
    """Raise NotImplementedError for a layer that was changed after its trainer was made, so that no rule covers it."""
    where = layer.name or "(root)"
    _refuse_options(where, layer.module, layer.rule)
    if layer.rule is not fallback and norms.rule_for(layer.module) is not layer.rule:
        raise NotImplementedError(
            f"{where}: its forward or type was replaced after the trainer was made, and its norm rule does not know it;"
            " replace it before"
        )


def _refuse_options(where: str, module: nn.Module, rule: ModuleType) -> None:
    if reason := getattr(rule, "refusal", lambda _: "")(module):
        raise NotImplementedError(f"{where}: {reason}")


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


def _held_below(module: nn.Module) -> tuple[str, str] | None:
    """A trainable parameter that the module holds itself and that a module in it holds, by both names, or None."""
    own = {id(value): name for name, value in module.named_parameters(recurse=False) if value.requires_grad}
    for name, value in module.named_parameters(remove_duplicate=False):
        if "." in name and id(value) in own:
            return own[id(value)], name
    return None


def _contribution(model: Sharded, name: str, contribution: str) -> Contribution:
    return (
        "partial" if contribution == "partial" or (contribution == "mixed" and not model.in_root(name)) else "complete"
    )


def _refuse_parameters(where: str, module: nn.Module, rule: ModuleType, own: Collection[str]) -> None:
    """Raise NotImplementedError for a parameter that the layer's rule knows nothing of."""
    complex_ones = [attribute for attribute in own if module.get_parameter(attribute).is_complex()]
    if complex_ones:
        raise NotImplementedError(
            f"{where}: {complex_ones[0]} is complex, and norms are of real gradients; hold its real and imaginary part"
            " as one real parameter, and take torch.view_as_complex of it in the forward"
        )
    if isinstance(module, ParametrizationList):
        raise NotImplementedError(
            f"{where} makes a weight of parameters (torch.nn.utils.parametrize), once for all samples: {_IN_FORWARD}"
        )
    known = getattr(rule, "PARAMETERS", ("weight", "bias"))
    if rule is not fallback and (unknown := [attribute for attribute in own if attribute not in known]):
        raise NotImplementedError(
            f"{where}: the norm rule of {norms.layer_type(module).__name__} knows no parameter {unknown[0]}, as"
            f" weight_norm, spectral_norm and pruning make them: {_IN_FORWARD}"
        )


def _refuse(name: str, module: nn.Module, rule: ModuleType, model: Sharded) -> None:
    """Raise NotImplementedError for a layer that its rule does not cover."""
    where = name or "(root)"
    _refuse_options(where, module, rule)
    if rule is not fallback and (twice := _held_twice(module, getattr(rule, "COVERS_CHILDREN", False))):
        raise NotImplementedError(
            f"{where}: {twice[0]} and {twice[1]} are one parameter, and the norm rule of"
            f" {norms.layer_type(module).__name__} does not know their sum; give each a parameter of its own"
        )
    if rule is fallback and (below := _held_below(module)):
        raise NotImplementedError(
            f"{where} is a {type(module).__name__} without a norm rule, and {below[1]} inside it is its parameter"
            f" {below[0]} too: running it again would count both uses, and {below[1]} counts its own; let layers alone"
            " hold it, such as a nn.Linear in it whose weight is the same parameter"
        )
    units = [below for below, child in module.named_modules() if child is not module and model.is_unit(child)]
    if units and getattr(rule, "NEEDS_PARAMETERS", False):
        raise NotImplementedError(
            f"{where} is a {type(module).__name__} that holds parameters itself and has no norm rule: its forward is "
            f"run again inside the backward, for which {', '.join(units)} in it would have to be gathered; put its own "
            "parameters into a module of their own, whose forward uses them"
        )
