"""Every use of a trainable parameter must lie inside a recorded forward of a layer that counts it.

A weight that is also used beside its layer (``F.linear(x, embedding.weight)``), or a layer whose forward never runs
because its parent computes with its weights, would train without counting in the norms: samples would be clipped too
little, silently. So the graph is compared with the records: each edge that leads to a parameter must start at a node
between the output and the inputs of a record that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .records import Record
from .sharded import Sharded

_REENTRANT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint: it hides the graph of what it recomputes until its own backward."""


def refuse_unrecorded(model: Sharded, records: Sequence[Record], losses: Tensor) -> None:
    """Raise NotImplementedError, naming the parameter, for a use that no record counts. Runs nothing."""
    if any(node.name() == _REENTRANT for node in nodes(losses.grad_fn, frozenset())):
        raise NotImplementedError(
            "a part of the model is recomputed by torch.utils.checkpoint with use_reentrant=True: its gradients would"
            " be formed out of sight of the norms, and never clipped; say use_reentrant=False"
        )
    counted = {
        (node, id(parameter))
        for record in records
        for node, parameter in leaves(record.output.grad_fn, record.inputs)
        if any(parameter is own for own in record.parameters)
    }
    for node, parameter in leaves(losses.grad_fn, frozenset()):
        if (node, id(parameter)) not in counted:
            raise NotImplementedError(
                f"parameter {_name(model, records, parameter)} is used outside the forward of the layer that holds it "
                f"(by {node.name()}): its norm would leave that use out; call the layer, or move the parameter to a "
                "module of its own whose forward uses it"
            )


def leaves(start: Any, stops: frozenset[Any]) -> Iterator[tuple[Any, nn.Parameter]]:
    """(node, parameter) of each edge to a parameter that is reached from ``start`` without passing ``stops``."""
    for node in nodes(start, stops):
        for below, _ in node.next_functions:
            variable = getattr(below, "variable", None)
            if isinstance(variable, nn.Parameter):
                yield node, variable


def nodes(start: Any, stops: frozenset[Any]) -> Iterator[Any]:
    """Each node of the autograd graph that is reached from ``start`` without passing ``stops``, once."""
    seen, pending = set(stops), [start]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(below for below, _ in node.next_functions)


def _name(model: Sharded, records: Sequence[Record], parameter: nn.Parameter) -> str:
    known = {id(slots[0].module._parameters.get(slots[0].attribute)): slots[0].name for slots in model.places}
    for record in records:
        known.update(zip(map(id, record.parameters), record.layer.names.values(), strict=True))
    return known.get(id(parameter), f"of shape {tuple(parameter.shape)}")
