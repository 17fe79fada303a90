"""Coverage of uses: every use of a trained parameter lies inside a recorded forward of a layer that counts it.

A weight that is also used beside its layer (``F.linear(x, embedding.weight)``), or a layer whose forward never runs
because its parent computes with its weights, would train without counting in the norms: samples would be clipped too
little, silently. So the graph is compared with the records: each edge that leads to a parameter must start at a node
between the output and the inputs of a record that holds the parameter, and the loss must reach it through that output
alone: what a layer leaves in an attribute, or a gradient of a gradient (``create_graph=True``), enters a layer from its
side, and the gradient that comes in there is in no backprop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..sharding.protocol import Sharded
from .records import Edge, Record, edges_of

_REENTRANT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint: it hides the graph of what it recomputes until its own backward."""


def refuse_unrecorded(model: Sharded, records: Sequence[Record], losses: Tensor) -> None:
    """Raise NotImplementedError, naming the parameter, for a use that no record counts. Runs nothing."""
    end = edges_of([losses])
    if any(node.name() == _REENTRANT for node in nodes(end, ())):
        raise NotImplementedError(
            "a part of the model is recomputed by torch.utils.checkpoint with use_reentrant=True: its gradients would"
            " be formed out of sight of the norms, and never clipped; say use_reentrant=False"
        )
    inside = [
        (record, node, parameter)
        for record in records
        for node, parameter in leaves(edges_of([record.output]), record.inputs)
        if any(parameter is own for own in record.parameters)
    ]
    counted = {(node, id(parameter)) for _, node, parameter in inside}
    for node, parameter in leaves(end, ()):
        if (node, id(parameter)) not in counted:
            raise NotImplementedError(
                f"parameter {_name(model, records, parameter)} is used outside the forward of the layer that holds it "
                f"(by {node.name()}): its norm would leave that use out; call the layer, or move the parameter to a "
                "module of its own whose forward uses it"
            )
    for together in _apart(records):
        own = {id(parameter) for record in together for parameter in record.parameters}
        elsewhere = {(node, id(parameter)) for record, node, parameter in inside if record not in together}
        for node, parameter in _beside(together, end):
            if id(parameter) in own and (node, id(parameter)) not in elsewhere:
                raise NotImplementedError(
                    f"the loss depends on parameter {_name(model, records, parameter)} beside the output of the layer "
                    f"that holds it (by {node.name()}), through what the layer leaves elsewhere or a gradient of a "
                    "gradient: norms know the gradient of the output alone; let the layer return all that the loss "
                    "needs, in one tensor"
                )


@contextmanager
def refused_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Around a backward that forms no gradient of ``parameters``: raise NotImplementedError if one is formed.

    A function of the user's own whose backward runs a part of the model again, and a backward through it, does that.
    """

    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError(
            f"a gradient of a parameter of shape {tuple(gradient.shape)} was formed inside the backward to layers'"
            " outputs, as by an autograd.Function that runs a part of the model again in its backward: it would never"
            " be clipped; use torch.utils.checkpoint with use_reentrant=False"
        )

    handles = [parameter.register_hook(refuse) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_hooks(records: Sequence[Record]) -> None:
    """Raise NotImplementedError for a parameter with hooks on its gradient: they would change it after clipping."""
    for record in records:
        for name, parameter in zip(record.layer.names.values(), record.parameters, strict=True):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise NotImplementedError(
                    f"parameter {name} has a hook on its gradient: it would be called on clipped gradients, and may"
                    " make them exceed the bound; remove it, and change reduced gradients in Trainer's notify"
                )


def leaves(starts: Iterable[Edge], stops: Iterable[Edge]) -> Iterator[tuple[Any, nn.Parameter]]:
    """(node, parameter) of each edge to a parameter that is reached from ``starts`` without passing ``stops``."""
    for node in nodes(starts, stops):
        for below, _ in node.next_functions:
            variable = getattr(below, "variable", None)
            if isinstance(variable, nn.Parameter):
                yield node, variable


def nodes(starts: Iterable[Edge], stops: Iterable[Edge]) -> Iterator[Any]:
    """Each node of the autograd graph that is reached from ``starts`` without passing ``stops``, once."""
    closed, seen, pending = set(stops), set(), list(starts)
    while pending:
        node, number = pending.pop()
        if node is None or node in seen or (node, number) in closed:
            continue
        seen.add(node)
        yield node
        pending.extend(node.next_functions)


def _apart(records: Sequence[Record]) -> list[list[Record]]:
    """Records of layers that hold no other layer, all together, then those of each layer that does."""
    modules = {id(record.layer.module) for record in records}
    holders = {
        id(record.layer.module)
        for record in records
        if any(id(child) in modules for child in record.layer.module.modules() if child is not record.layer.module)
    }
    found: dict[int | None, list[Record]] = {}
    for record in records:
        number = id(record.layer.module)
        found.setdefault(number if number in holders else None, []).append(record)
    return list(found.values())


def _beside(records: Sequence[Record], end: Sequence[Edge]) -> Iterator[tuple[Any, nn.Parameter]]:
    """(node, parameter) of each edge to a parameter that the loss, ``end``, reaches through none of their outputs."""
    outputs = edges_of([tensor for record in records for tensor in (record.output, *record.others)])
    below = [edge for record in records for edge in record.inputs]
    return leaves([*end, *below], outputs)


def _name(model: Sharded, records: Sequence[Record], parameter: nn.Parameter) -> str:
    known = {id(slots[0].module._parameters.get(slots[0].attribute)): slots[0].name for slots in model.places}
    for record in records:
        known.update(zip(map(id, record.parameters), record.layer.names.values(), strict=True))
    return known.get(id(parameter), f"of shape {tuple(parameter.shape)}")
