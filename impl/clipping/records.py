"""Records: what is known of a layer, and what one forward of it leaves for the norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import fallback
from ..norms._products import Products
from ..norms.fallback import Call
from ..sharding.nested_tensors import tensors_in
from ..sharding.protocol import Sharded
from .norm_aggregation import Contribution

HALF = (torch.bfloat16, torch.float16)
Edge = tuple[Any, int]
"""Where a tensor is attached to the autograd graph: the node that made it, and which of the node's outputs it is."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with trainable parameters, its norm rule, who shards it, and what this rank contributes.

    ``names`` and ``contributions``: by attribute of each of its trainable parameters, the canonical name, which is the
    same for all uses of a tied one, and the contribution. ``frozen`` attributes have neither.
    """

    name: str
    module: nn.Module
    rule: ModuleType
    model: Sharded
    names: Mapping[str, str]
    contributions: Mapping[str, Contribution]

    @property
    def contribution(self) -> Contribution:
        """ "partial" if any of its parameters contributes that way."""
        return "partial" if "partial" in self.contributions.values() else "complete"

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that the module shows now, without those that something else stands in for."""
        paths = [attribute.rpartition(".") for attribute in self.names]
        shown = [self.module.get_submodule(path)._parameters.get(last) for path, _, last in paths]
        return [parameter for parameter in shown if isinstance(parameter, nn.Parameter)]

    @property
    def needs_parameters(self) -> bool:
        """Whether its rule has to be called while its unit is gathered."""
        return bool(getattr(self.rule, "NEEDS_PARAMETERS", False))


@dataclass(frozen=True, eq=False)
class Record:
    """One layer in one forward: ``activations`` is its input, or what was made of it; ``output`` is in the graph.

    ``others``: further tensors of its output, nested ones too, which no loss may depend on. ``parameters`` are the
    trainable ones as they were then, gathered, and ``inputs`` where its inputs, nested ones too, are in the graph.
    ``version`` and ``given`` tell changes in place: of the output, and of each input.
    """

    layer: Layer
    activations: Tensor | Call | Products
    output: Tensor
    version: int
    others: tuple[Tensor, ...] = ()
    parameters: tuple[nn.Parameter, ...] = ()
    inputs: frozenset[Edge] = frozenset()
    given: tuple[int, ...] = ()

    @property
    def input_changed(self) -> bool:
        """Whether an input that norms are formed from was changed in place since the forward; a bias needs none."""
        return set(self.layer.names) != {"bias"} and self.given != _versions(self.activations)


@dataclass(frozen=True, eq=False)
class Use:
    """A record with its backprop; ``held`` are its per-sample gradients, where they had to be formed in the backward.

    That is where the rule needs the parameters' values, which are freed later, and knows no products to hold instead.
    """

    record: Record
    raw: Tensor
    held: Mapping[str, Tensor] | None = None

    @property
    def activations(self) -> Any:
        """The layer's input, in float32 at least: nothing is squared or summed in half precision."""
        return lifted(self.record.activations)

    @property
    def backprop(self) -> Tensor:
        """The gradient of the losses' sum with respect to the layer's output, in float32 at least."""
        raised: Tensor = lifted(self.raw)
        return raised

    def only(self, rows: Tensor) -> Use:
        """The same use by some samples only, ``rows`` [b'] their numbers."""
        record, held = self.record, self.held
        if isinstance(record.activations, Products):
            record = replace(record, activations=record.activations.only(rows))
        elif held is None and isinstance(record.activations, Tensor):
            record = replace(record, activations=record.activations[rows])
        kept = None if held is None else {attribute: gradient[rows] for attribute, gradient in held.items()}
        return Use(record, self.raw[rows], kept)

    def without_parameters(self) -> Use:
        """The same use, which needs no parameters any more: they are gathered now. Raises RuntimeError if not."""
        layer, record = self.record.layer, self.record
        if not hasattr(layer.rule, "products"):
            return Use(record, self.raw, self.per_sample_gradient())
        refuse_freed(record)
        products = layer.rule.products(layer.module, record.activations, self.raw)
        return Use(replace(record, activations=products), self.raw)

    def per_sample_gradient(self) -> Mapping[str, Tensor]:
        """{attribute: [B, *shape]}. Raises RuntimeError if that takes parameters that are not gathered any more."""
        if self.held is not None:
            return self.held
        layer, record = self.record.layer, self.record
        needs = layer.needs_parameters and not isinstance(record.activations, Products)
        if needs:
            refuse_freed(record)
        inputs = (record.activations, self.raw) if needs else (self.activations, self.backprop)
        try:
            found: dict[str, Tensor] = layer.rule.per_sample_gradient(layer.module, *inputs)
        except NotImplementedError as error:
            error.add_note(f"the layer is {layer.name or '(root)'}")
            raise
        return {attribute: lifted(gradient) for attribute, gradient in found.items()}


def lifted(value: Any) -> Any:
    """A half-precision tensor in float32, products with theirs; anything else as it is."""
    if isinstance(value, Products):
        return value.lifted(lifted)
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def record_of(layer: Layer, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Record:
    """The record of a forward that has just run, with its unit still gathered.

    Raises NotImplementedError for what no norm can be taken of: an input by keyword, an output that is no tensor.
    """
    activations = _activations(layer, inputs, keywords)
    main, others = _outputs(layer, output)
    if isinstance(activations, Call):
        _refuse_other_rows(layer, activations, main)
        device = main.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        activations = replace(activations, output=main.detach(), autocast=autocast)
    parameters = tuple(layer.module.get_parameter(attribute) for attribute in layer.names)
    given = frozenset(edges_of(tensors_in((inputs, keywords))))
    return Record(layer, activations, main, main._version, others, parameters, given, _versions(activations))


def edges_of(tensors: Sequence[Tensor]) -> list[Edge]:
    """Of those that were computed from something that requires a gradient."""
    return [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.grad_fn is not None]


def _refuse_other_rows(layer: Layer, call: Call, output: Tensor) -> None:
    """Raise NotImplementedError unless all tensors that a layer was called with have a row for each of its output's."""
    for given in call.rows():
        if given.shape[:1] != output.shape[:1]:
            raise NotImplementedError(
                f"{layer.name} was called with a tensor of shape {tuple(given.shape)} and gave one of shape"
                f" {tuple(output.shape)}: each tensor that it is given must have a row for each sample; keep what all"
                " samples share in a buffer of the layer"
            )


def refuse_freed(record: Record) -> None:
    """Raise RuntimeError if the rule needs parameters' values and their unit has been freed since the forward."""
    layer = record.layer
    if not layer.needs_parameters:
        return
    now = [layer.module.get_parameter(attribute) for attribute in layer.names]
    if any(p is not q or not p.numel() for p, q in zip(now, record.parameters, strict=True)):
        raise RuntimeError(
            f"{layer.name}: its norm rule needs its parameters, and its sharding unit was freed before its output's "
            "gradient arrived (its input does not depend on the unit's input): keep units gathered after forward "
            "(reshard_after_forward=False), or give it a sharding unit of its own"
        )


def _versions(activations: Tensor | Call | Products) -> tuple[int, ...]:
    """Counters of changes in place; products are no inputs of anybody's."""
    if isinstance(activations, Products):
        return ()
    return tuple(rows._version for rows in fallback.as_call(activations).rows())


def _activations(layer: Layer, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | Call:
    detached = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
    named = {name: value.detach() if isinstance(value, Tensor) else value for name, value in keywords.items()}
    call: Call = getattr(layer.rule, "call", Call)(detached, named)
    tensors = [name for name, value in named.items() if isinstance(value, Tensor) and name not in call.shared]
    if tensors and not hasattr(layer.rule, "call"):
        raise NotImplementedError(f"{layer.name} was called with tensors by keyword, {tensors}: pass them by position")
    if layer.needs_parameters:
        return call
    if len(call.rows()) != 1 or not isinstance(detached[0], Tensor):
        known = getattr(layer.rule, "ONE_INPUT", "its activations, sample axis first")
        kind, got = type(layer.module).__name__, len(call.rows())
        raise NotImplementedError(f"{layer.name}: the norm rule of {kind} knows one input ({known}), got {got}")
    return detached[0]


def _outputs(layer: Layer, output: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    main = fallback.main_output(output)
    if not isinstance(main, Tensor):
        got = type(output).__name__
        raise NotImplementedError(f"{layer.name}: its output is a {got}, per-sample norms need a tensor, or one first")
    others = output[1:] if isinstance(output, (tuple, list)) else ()
    return main, tuple(value for value in tensors_in(others) if value.requires_grad)
