"""Shapes that follow from a ModelSpec: what enters and leaves each layer, and the shapes of its parameters.

Legend: V rows of a vocabulary, d features, C channels, T positions, L extent of each spatial direction. Shapes are of
one sample, without the batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from fsdpcheck.case.model import LayerKind, LayerSpec, ModelSpec

Shape = tuple[int, ...]
StageKind = Literal["embedding", "embedding_bag", "linear", "layer_norm", "rms_norm", "group_norm", "conv", "attention"]

SPATIAL = {"signal": 1, "image": 2, "volume": 3}
"""Kind of input -> number of spatial directions behind the channels."""
PROJECTIONS = ("query", "key", "value", "output")
"""The Linear layers of an attention, in the order of its parameters."""

HEADS = "heads"
"""Name of the nn.MultiheadAttention in its layer."""
_OF_HEADS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
"""Its parameters, in their order."""


class Stage(NamedTuple):
    """The input stage, if it has parameters (``spec`` None), or one layer.

    ``flatten``: a Flatten stands before it. ``channels_first``: it sees [C, ...] with spatial directions behind.
    ``shapes``: its parameters by name ("weight", "bias", "query.weight", ...), in the order of ``named_parameters``.
    """

    kind: StageKind
    spec: LayerSpec | None
    entering: Shape
    leaving: Shape
    flatten: bool
    channels_first: bool
    shapes: dict[str, Shape]

    @property
    def weights(self) -> tuple[Shape, ...]:
        """Shapes of the parameters that are no biases."""
        return tuple(shape for name, shape in self.shapes.items() if not name.endswith("bias"))


@lru_cache(maxsize=256)
def stages(spec: ModelSpec) -> tuple[Stage, ...]:
    """Input stage (if it has parameters) and layers in forward order. Wrong specs give wrong shapes, never an error."""
    return tuple(_stages(spec))


def body_input(spec: ModelSpec) -> Shape:
    """What the first layer sees of one sample: [d], [T, d], or [C, L, ...]."""
    if spec.input in SPATIAL:
        return (spec.features, *(spec.length,) * SPATIAL[spec.input])
    return (spec.features,) if spec.input in ("vector", "bags") else (spec.length, spec.features)


def body_output(spec: ModelSpec) -> Shape:
    """What the last layer gives of one sample."""
    return stages(spec)[-1].leaving


def item_units(spec: ModelSpec) -> tuple[int, ...]:
    """Index of the sharding unit of every stage, -1 for the root."""
    units = [unit for unit, size in enumerate(spec.units) for _ in range(size)]
    return tuple(units + [-1] * (len(spec.layers) + spec.has_front - len(units)))


def row_counts(spec: ModelSpec) -> tuple[int, ...]:
    """Rows (size of dim 0) of the body's weights, and so of its biases, in forward order."""
    return tuple(shape[0] for stage in stages(spec) for shape in stage.weights)


def _stages(spec: ModelSpec) -> Iterator[Stage]:
    shape, spatial = body_input(spec), spec.input in SPATIAL
    if spec.layer_norm:
        norm: dict[str, Shape] = {"weight": (spec.features,), "bias": (spec.features,)}
        yield Stage("layer_norm", None, shape, shape, False, False, norm)
    elif spec.has_front:
        kind: StageKind = "embedding" if spec.input == "tokens" else "embedding_bag"
        yield Stage(kind, None, (spec.length,), shape, False, False, {"weight": (spec.vocabulary, spec.features)})
    for layer in spec.layers:
        flatten = spatial and layer.kind not in ("conv", "group_norm")
        spatial = spatial and not flatten
        shape = (math.prod(shape),) if flatten else shape
        leaving = _leaving(layer, shape)
        yield Stage(layer.kind, layer, shape, leaving, flatten, spatial, _parameters(layer, shape))
        shape = leaving


def _leaving(layer: LayerSpec, entering: Shape) -> Shape:
    if layer.kind == "linear":
        return (*entering[:-1], layer.width)
    if layer.same:
        return (layer.width, *entering[1:])
    if layer.kind == "conv":
        reach = layer.dilation * (layer.kernel - 1) + 1
        return (layer.width, *((size + 2 * layer.padding - reach) // layer.stride + 1 for size in entering[1:]))
    return entering


def _parameters(layer: LayerSpec, entering: Shape) -> dict[str, Shape]:
    if layer.heads:
        return _of_heads(layer)
    weight = _weight(layer.kind, layer, entering)
    names = PROJECTIONS if layer.kind == "attention" else ("",)
    shapes: dict[str, Shape] = {}
    for name in names:
        prefix = f"{name}." if name else ""
        shapes[f"{prefix}weight"] = weight
        if layer.bias:
            shapes[f"{prefix}bias"] = weight[:1]
    return shapes


def _of_heads(layer: LayerSpec) -> dict[str, Shape]:
    """Of an nn.MultiheadAttention, whose projections of queries, keys and values are one weight."""
    sizes: dict[str, Shape] = {"in_proj_weight": (3 * layer.width, layer.width), "out_proj.weight": (layer.width,) * 2}
    sizes |= {"in_proj_bias": (3 * layer.width,), "out_proj.bias": (layer.width,)} if layer.bias else {}
    return {f"{HEADS}.{name}": sizes[name] for name in _OF_HEADS if name in sizes}


def _weight(kind: LayerKind, layer: LayerSpec, entering: Shape) -> Shape:
    if kind == "conv":
        return (layer.width, entering[0] // layer.groups, *(layer.kernel,) * (len(entering) - 1))
    return (layer.width, entering[-1]) if kind in ("linear", "attention") else (layer.width,)
