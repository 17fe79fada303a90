"""The model and the loss a case describes: ordinary layers, filled with the case's integers.

Legend: b samples of a forward, T positions, d and p input and output features, V tokens, F features of the flattened
body output (T*p, or p without positions), R rows of the instrument, W ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck import values
from fsdpcheck.case import Activation, Case, LayerSpec, Loss

DTYPES = {"float64": torch.float64, "float32": torch.float32}
EXACT_SCALE_EXPONENT = {"float64": 40, "float32": 8}
"""s of the "exact" clipping family: per-sample losses grow by 2**s, so that an eps beside a norm is absorbed."""

Kind = Literal["embedding", "layer_norm", "linear"]
Reduction = Literal["none", "mean", "sum"]


class Layer(NamedTuple):
    """One layer with parameters: canonical module name ("units.0.linear1"), kind, and its LayerSpec if Linear.

    ``shape`` is the weight's: Linear [p, d], Embedding [V, d], LayerNorm [d]. ``tied_to`` is the canonical module name
    of the earlier layer whose weight this one shares, or empty.
    """

    name: str
    kind: Kind
    spec: LayerSpec | None
    shape: tuple[int, ...]
    tied_to: str = ""


class Abs(nn.Module):
    """|x|, elementwise; the subgradient at 0 is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class CaseModel(nn.Module):
    """Units to shard, layers left to the root, and the instrument. Forward: inputs [b, ...] -> [b, F + R]; b may be 0.

    The instrument is a Linear(1, R) fed with ones: its per-sample gradient is whatever the loss multiplies its output
    with, so it measures and shapes clip factors without touching the body (see proof.py).
    """

    def __init__(self, units: list[nn.Sequential], tail: nn.Sequential, instrument: nn.Linear) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.tail = tail
        self.instrument = instrument

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for unit in self.units:
            hidden = unit(hidden)
        body_BF = self.tail(hidden).flatten(1)
        ones_B1 = torch.ones(len(inputs), 1, dtype=body_BF.dtype, device=body_BF.device)
        return torch.cat([body_BF, self.instrument(ones_B1)], dim=1)


class PerSampleLoss(nn.Module):
    """Per-sample loss [b] of packed outputs and targets [b, F + R], times ``scale``; sums, never means, over features.

    mse: 0.5 * sum e^2; linear: <y, t>; hinge: sum relu(1 - y * sign t); l1: sum |e|; and <u, v> for the instrument's
    targets u and output v. ``reduction`` is over samples.
    """

    def __init__(self, kind: Loss, features: int, scale: float = 1.0, reduction: Reduction = "none") -> None:
        super().__init__()
        self.kind, self.features, self.scale, self.reduction = kind, features, scale, reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y_BF, v_BR = outputs[:, : self.features], outputs[:, self.features :]
        t_BF, u_BR = targets[:, : self.features], targets[:, self.features :]
        losses_B = (self._body(y_BF, t_BF) + (u_BR * v_BR).sum(1)) * self.scale
        if self.reduction == "none":
            return losses_B
        return losses_B.mean() if self.reduction == "mean" else losses_B.sum()

    def with_reduction(self, reduction: Reduction) -> PerSampleLoss:
        """The same loss, reduced over samples as asked."""
        return PerSampleLoss(self.kind, self.features, self.scale, reduction)

    def _body(self, y_BF: Tensor, t_BF: Tensor) -> Tensor:
        if self.kind == "mse":
            return 0.5 * (y_BF - t_BF).square().sum(1)
        if self.kind == "linear":
            return (y_BF * t_BF).sum(1)
        if self.kind == "hinge":
            return F.relu(1 - y_BF * t_BF.sign()).sum(1)
        return (y_BF - t_BF).abs().sum(1)


def build(case: Case) -> CaseModel:
    """The case's model on CPU, filled with ``initial_parameters(case)``; torch's random streams are not touched."""
    parameters = initial_parameters(case)
    layers = layer_names(case)
    groups: list[dict[str, nn.Module]] = [{} for _ in range(len(case.model.units) + 1)]
    made: dict[str, nn.Module] = {}
    for layer in layers:
        place, local = _split(layer.name)
        made[layer.name] = _module(case, layer, parameters, made)
        groups[place][local] = made[layer.name]
        if layer.spec is not None and layer.spec.activation != "identity":
            groups[place][local.replace("linear", "activation")] = _activation(layer.spec.activation)
    sequences = [nn.Sequential() for _ in groups]
    for sequence, group in zip(sequences, groups, strict=True):
        for name, module in group.items():
            sequence.add_module(name, module)
    instrument = nn.Linear(1, instrument_rows(case), bias=False, device="meta")
    instrument.weight = nn.Parameter(parameters["instrument.weight"])
    return CaseModel(sequences[:-1], sequences[-1], instrument)


def initial_parameters(case: Case) -> dict[str, Tensor]:
    """Parameters before the first step by canonical name, integers in [-weights, weights] in the case's dtype.

    In the order of ``named_parameters``: a shared weight once, under its first name. Values hang on the layer's
    position in the chain, not on its unit, so regrouping units keeps them.
    """
    bound, dtype = case.arithmetic.weights, DTYPES[case.arithmetic.dtype]
    return {
        name: torch.from_numpy(values.symmetric(case.seed, "parameter " + _local(name), shape, bound)).to(dtype)
        for name, shape in parameter_shapes(case).items()
    }


def parameter_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by canonical name, in the order of ``named_parameters``; a shared weight once."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layer_names(case):
        if not layer.tied_to:
            shapes[f"{layer.name}.weight"] = layer.shape
        if layer.kind == "layer_norm" or (layer.spec is not None and layer.spec.bias):
            shapes[f"{layer.name}.bias"] = layer.shape[:1]
    shapes["instrument.weight"] = (instrument_rows(case), 1)
    return shapes


def layer_names(case: Case) -> tuple[Layer, ...]:
    """The layers with parameters in forward order (the instrument, which stands beside the chain, is not among them).

    Behind each Linear comes its ``spec.activation``; identity has no module.
    """
    spec = case.model
    names = _canonical(case)
    layers: list[Layer] = []
    if spec.input == "tokens":
        layers.append(Layer(names[0], "embedding", None, (spec.vocabulary, spec.features)))
    elif spec.layer_norm:
        layers.append(Layer(names[0], "layer_norm", None, (spec.features,)))
    front, width = len(layers), spec.features
    for position, layer in enumerate(spec.layers):
        tied = spec.tied is not None and position == spec.tied[1]
        tied_to = names[front + spec.tied[0]] if tied and spec.tied is not None else ""
        layers.append(Layer(names[front + position], "linear", layer, (layer.width, width), tied_to))
        width = layer.width
    return tuple(layers)


def unit_names(case: Case) -> tuple[tuple[str, ...], ...]:
    """Canonical module names of the inner sharding units, one tuple a unit, in forward order; the root is implied."""
    return tuple((f"units.{index}",) for index in range(len(case.model.units)))


def loss_for(case: Case) -> PerSampleLoss:
    """The case's per-sample loss, scaled by ``loss_scale(case)``."""
    return PerSampleLoss(case.step.loss, body_features(case), loss_scale(case))


def body_features(case: Case) -> int:
    """F, the number of features of one sample's flattened body output."""
    positions = 1 if case.model.input == "vector" else case.model.length
    return positions * case.model.layers[-1].width


def instrument_rows(case: Case) -> int:
    """R: at least 4 (four squares), at least B for the coefficient probe, and a multiple of W.

    A multiple of W, so that the instrument never adds a ragged or an empty shard to a case that has none.
    """
    wanted = case.layout.batch_size if case.step.clipping == "probe" else 4
    return -(-wanted // case.world_size) * case.world_size


def loss_scale_exponent(case: Case) -> int:
    """s in loss_scale = W * 2**s: large in the "exact" clipping family, else 0."""
    return EXACT_SCALE_EXPONENT[case.arithmetic.dtype] if case.step.clipping == "exact" else 0


def loss_scale(case: Case) -> float:
    """What every per-sample loss is multiplied by: W, so that averaging over ranks is exact, times 2**s."""
    return float(case.world_size * 2 ** loss_scale_exponent(case))


def _canonical(case: Case) -> list[str]:
    """Canonical module names of the input stage, if it has parameters, and of the Linear layers."""
    spec = case.model
    local = ["embedding" if spec.input == "tokens" else "layer_norm"] if spec.has_front else []
    local += [f"linear{position}" for position in range(len(spec.layers))]
    places = [f"units.{unit}" for unit, size in enumerate(spec.units) for _ in range(size)]
    places += ["tail"] * (len(local) - len(places))
    return [f"{place}.{name}" for place, name in zip(places, local, strict=True)]


def _local(parameter: str) -> str:
    """A parameter's name without its unit: "linear0.weight"."""
    return ".".join(parameter.split(".")[-2:])


def _split(name: str) -> tuple[int, str]:
    """Index of the group a layer stands in (-1: the root's tail) and its name there."""
    place, local = name.rsplit(".", 1)
    return (-1 if place == "tail" else int(place.removeprefix("units."))), local


def _module(case: Case, layer: Layer, parameters: dict[str, Tensor], made: dict[str, nn.Module]) -> nn.Module:
    module: nn.Module
    if layer.kind == "embedding":
        rows, columns = layer.shape
        module = nn.Embedding(rows, columns, padding_idx=case.model.padding_idx, device="meta")
    elif layer.kind == "layer_norm":
        module = nn.LayerNorm(layer.shape[0], eps=0.0, device="meta")
    else:
        rows, columns = layer.shape
        module = nn.Linear(columns, rows, bias=layer.spec is not None and layer.spec.bias, device="meta")
    frozen = layer.spec.frozen if layer.spec is not None else "none"
    if layer.tied_to:
        shared = made[layer.tied_to].weight
        assert isinstance(shared, nn.Parameter)
        module.weight = shared
    else:
        trained = frozen not in ("weight", "all")
        module.weight = nn.Parameter(parameters[f"{layer.name}.weight"], requires_grad=trained)
    if f"{layer.name}.bias" in parameters:
        trained = frozen not in ("bias", "all")
        module.bias = nn.Parameter(parameters[f"{layer.name}.bias"], requires_grad=trained)
    return module


def _activation(kind: Activation) -> nn.Module:
    if kind == "relu":
        return nn.ReLU()
    if kind == "leaky_relu":
        return nn.LeakyReLU(0.5)
    if kind == "hardtanh":
        return nn.Hardtanh(-4.0, 4.0)
    return Abs() if kind == "abs" else nn.Identity()
