"""The model a case describes: ordinary layers, filled with the case's integers.

Legend: b samples of a forward, T positions, d and p input and output features, V tokens, F features of the flattened
body output (T*p, or p without positions), R rows of the instrument, W ranks.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdpcheck.case import Dtype, Numbers, TrainingCase, UserModelSpec, prng
from fsdpcheck.case.model import Used
from fsdpcheck.case.shapes import HEADS, Shape, Stage, StageKind, body_output, stages
from fsdpcheck.workload import clip_groups, layers, numerics
from fsdpcheck.workload.clip_groups import INSTRUMENT
from fsdpcheck.workload.losses import OwnLoss, PerSampleLoss
from fsdpcheck.workload.user_model import casting, spelled_out
from fsdpcheck.workload.user_model import loading as user_model
from fsdpcheck.workload.user_model.dtype_widening import widened

DTYPES = {"float64": torch.float64, "float32": torch.float32}
EXACT_SCALE_EXPONENT = {"float64": 40, "float32": 8}
"""s of the "exact" clipping family: per-sample losses grow by 2**s, so that an eps beside a norm is absorbed."""
REAL_BITS = {"float64": 30, "float32": 23}
"""Bits of a drawn fraction: products of two have more than the dtype holds, so sums round."""


class Layer(NamedTuple):
    """One layer with parameters: canonical module name ("units.0.linear1"), what stands there, its parameters' shapes.

    ``shapes`` by name inside the layer ("weight", "query.bias"). ``tied_to`` is the canonical module name of the
    earlier layer whose weight this one shares, or empty.
    """

    name: str
    stage: Stage
    tied_to: str = ""

    @property
    def kind(self) -> StageKind:
        return self.stage.kind

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.stage.shapes


class Chain(nn.Sequential):
    """Layers of which some run otherwise than once a sample (``LayerSpec.used``), by their name in the chain."""

    def __init__(self, used: dict[str, Used]) -> None:
        super().__init__()
        self.used = used

    def forward(self, inputs: Tensor) -> Any:
        """[b, ...] -> [b, ...]"""
        return self.through(inputs)

    def through(self, hidden: Tensor) -> Tensor:
        """What the layers give."""
        for name, module in self.named_children():
            if name != "instrument":
                hidden = _through(module, hidden, self.used.get(name, "once"))
        return hidden


def _through(module: nn.Module, hidden: Tensor, used: Used) -> Tensor:
    """[b, ...]: what one layer makes of ``hidden`` [b, ...]."""
    if used == "routed":
        chosen_b = hidden.flatten(1)[:, 0] > 0
        if not bool(chosen_b.any()):
            return hidden
        return torch.where(chosen_b.reshape(-1, *(1,) * (hidden.dim() - 1)), module(hidden), hidden)
    if used == "for all":
        row: Tensor = module(hidden.new_ones(1, *hidden.shape[1:]))
        return hidden + row
    if used == "dropped":
        module(hidden)
        return hidden
    if used == "beside":
        both: Tensor = module(hidden) + functional.linear(hidden, module.get_parameter("weight"))
        return both
    if used == "across":
        own: Tensor = module(hidden)
        return own + own.roll(1, 0)
    if used == "reordered":
        moved: Tensor = module(hidden.roll(1, 0))
        return moved.roll(-1, 0)
    found: Tensor = module(module(hidden)) if used == "twice" else module(hidden)
    return found


class Metered(Chain):
    """A unit with an instrument of its own, called "instrument": gives (what the chain gives, [b, R])."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.through(inputs)
        return hidden, _read(self.get_submodule("instrument"), hidden)


class CaseModel(nn.Module):
    """Units to shard, layers left to the root, and the instrument. Forward: inputs [b, ...] -> [b, F + G * R] with G
    clipping groups, each with an instrument, the root's last; b may be 0.

    The instrument is a Linear(1, R) fed with ones: its per-sample gradient is whatever the loss multiplies its output
    with, so it measures and shapes clip factors without touching the body (see oracle/certificate.py).
    """

    def __init__(self, units: list[nn.Sequential], tail: nn.Sequential, instrument: nn.Linear) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.tail = tail
        self.instrument = instrument

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, readings = inputs, []
        for unit in self.units:
            hidden = unit(hidden)
            if isinstance(hidden, tuple):
                hidden, reading = hidden
                readings.append(reading)
        body_BF = self.tail(hidden).flatten(1)
        return torch.cat([body_BF, *readings, _read(self.instrument, body_BF)], dim=1)


def _read(instrument: nn.Module, like: Tensor) -> Tensor:
    """[b, R]: an instrument's output for the b samples of ``like``."""
    reading: Tensor = instrument(torch.ones(len(like), 1, dtype=like.dtype, device=like.device))
    return reading


class UserCaseModel(CaseModel):
    """The instrument beside a model of the user's own, which stays as it is: inputs [b, ...] -> [b, F + R]."""

    def __init__(self, model: nn.Module, own: UserModelSpec, instrument: nn.Linear, dtype: torch.dtype) -> None:
        """``dtype``: the case's, in which the model's output is taken, if it names one."""
        nn.Module.__init__(self)
        self.model, self.own, self.instrument, self.dtype = model, own, instrument, dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return self.beside(self.model(inputs), len(inputs))

    def beside(self, outputs: Tensor, samples: int) -> Tensor:
        """[b, F + R]: the outputs of the user's model for so many samples, and the instrument's beside them."""
        instrument: Any = self.instrument  # as it is now: a function of the user's casts their model alone
        if self.own.names:
            with widened(self.own, instrument.weight.dtype):
                outputs = outputs.to(self.dtype)
        body_BF = outputs.reshape(samples, self.own.features)
        return torch.cat([body_BF, _read(instrument, body_BF.to(instrument.weight.dtype))], dim=1)


def build(case: TrainingCase) -> CaseModel:
    """The case's model on CPU, filled with ``initial_parameters(case)``; torch's random streams are not touched."""
    parameters = initial_parameters(case)
    if case.model.own is not None:
        return _build_user_model(case, case.model.own, parameters)
    metered = len(clip_groups.names(case)) > 1
    used = _used(case)
    groups = [Metered(own) if metered else _chain(own) for own in used[:-1]] + [_chain(used[-1])]
    made: dict[str, nn.Module] = {}
    for position, layer in enumerate(layer_names(case)):
        place, local = _split(layer.name)
        made[layer.name] = layers.module(case.model, layer.stage)
        _fill(made[layer.name], layer, parameters, made)
        if layer.stage.flatten:
            groups[place].add_module("flatten", nn.Flatten())
        groups[place].add_module(local, made[layer.name])
        spec = layer.stage.spec
        if spec is not None and spec.activation != "identity":
            number = position - case.model.has_front
            groups[place].add_module(f"activation{number}", layers.activation(spec.activation))
    *inner, instrument = [_instrument(case, parameters[name]) for name in clip_groups.instruments(case)]
    for unit, own in zip(groups, inner, strict=False):
        unit.add_module("instrument", own)
    return CaseModel(groups[:-1], groups[-1], instrument)


def _used(case: TrainingCase) -> list[dict[str, Used]]:
    """Of each unit, and last of the root: layers by their name there that run otherwise than once a sample."""
    found: list[dict[str, Used]] = [{} for _ in range(len(case.model.units) + 1)]
    for layer in layer_names(case):
        place, local = _split(layer.name)
        if layer.stage.spec is not None and layer.stage.spec.used != "once":
            found[place][local] = layer.stage.spec.used
    return found


def _chain(used: dict[str, Used]) -> nn.Sequential:
    return Chain(used) if used else nn.Sequential()


def wide(case: TrainingCase) -> CaseModel:
    """The case's model in float64, as the single device has it."""
    return casting.cast(build(case), torch.float64)


def _build_user_model(case: TrainingCase, own: UserModelSpec, parameters: dict[str, Tensor]) -> CaseModel:
    instrument = _instrument(case, parameters[INSTRUMENT])
    dtype = DTYPES[case.arithmetic.dtype]
    made = UserCaseModel(casting.cast(user_model.model(own.build), dtype), own, instrument, dtype)
    for name, parameter in made.model.named_parameters():
        parameter.data = parameters[f"model.{name}"]
    surrogates = case.arithmetic.numbers == "grid" and "surrogates" in own.traits
    if surrogates:
        spelled_out.round_tables_(made.model, own.build, numerics.grids_of(case).turn)
    if surrogates or own.names:
        spelled_out.attach(made.model, own, surrogates)
    return made


def _instrument(case: TrainingCase, value: Tensor) -> nn.Linear:
    made = layers.linear(1, instrument_rows(case), bias=False)
    made.weight = nn.Parameter(value)
    return made


def frozen(case: TrainingCase) -> frozenset[str]:
    """Canonical names of the parameters that are not trained in the first step."""
    return frozenset(name for name, parameter in build(case).named_parameters() if not parameter.requires_grad)


def initial_parameters(case: TrainingCase) -> dict[str, Tensor]:
    """Parameters before the first step by canonical name, in [-weights, weights], in the case's dtype.

    Integers, or fractions if the case's numbers are real (a user's model has its own). In the order of
    ``named_parameters``: a shared weight once,
    under its first name. Values depend on the layer's position in the chain, not on its unit, so regrouping units keeps
    them.
    """
    bound = case.arithmetic.weights
    if case.model.own is not None and case.arithmetic.numbers == "real":
        own = user_model.values(case.model.own.build)
        made = {f"model.{name}": value.to(DTYPES[case.arithmetic.dtype], copy=True) for name, value in own.items()}
        return {**made, INSTRUMENT: drawn(case, "parameter " + INSTRUMENT, (instrument_rows(case), 1), bound)}
    found = {
        name: drawn(case, "parameter " + _local(name), shape, bound) for name, shape in parameter_shapes(case).items()
    }
    return {name: _thinned(case, name, value) for name, value in found.items()}


def _thinned(case: TrainingCase, name: str, value: Tensor) -> Tensor:
    """A matrix with about one entry a row kept, of d, and no row without: deep models stay within the bits there are.

    Where an entry is zero, its gradient is not; only fewer paths lead further back. What is kept, and a vector, which
    may be all that a feature is multiplied by, has no zeros: a model without biases would be dead behind them.
    """
    if name == INSTRUMENT or case.model.own is None:
        return value
    value = torch.where(value == 0, 1.0, value)
    if value.dim() < 2:
        return value
    row = value[0].numel() if name in user_model.convolved(case.model.own.build) else value.shape[-1]
    places = prng.integers(case.seed, "kept of " + name, (value.numel() // row, row), 0, row - 1)
    kept = torch.from_numpy(places == 0)
    kept[torch.arange(len(places)), torch.from_numpy(places.argmin(1))] = True  # one that is kept, or any if none is
    return value * kept.reshape(value.shape)


def drawn(case: TrainingCase, stream: str, shape: Shape, bound: int) -> Tensor:
    """New tensor of a stream in [-bound, bound], case dtype: integers, or fractions if the case's numbers are real."""
    return _drawn(case.seed, stream, shape, bound, case.arithmetic.numbers, case.arithmetic.dtype).clone()


@functools.lru_cache(maxsize=64)  # every rank of a simulated run draws the same
def _drawn(seed: int, stream: str, shape: Shape, bound: int, numbers: Numbers, dtype: Dtype) -> Tensor:
    if numbers == "real":
        found = prng.fractions(seed, stream, shape, REAL_BITS[dtype]) * bound
    else:
        found = prng.symmetric(seed, stream, shape, bound).astype("float64")
    return torch.from_numpy(found).to(DTYPES[dtype])


def parameter_shapes(case: TrainingCase) -> dict[str, Shape]:
    """Shape of every parameter by canonical name, in the order of ``named_parameters``; a shared weight once."""
    if case.model.own is not None:
        own = user_model.values(case.model.own.build)
        return {**{f"model.{n}": tuple(v.shape) for n, v in own.items()}, INSTRUMENT: (instrument_rows(case), 1)}
    shapes: dict[str, Shape] = {}
    for group, instrument in enumerate(clip_groups.instruments(case)):
        for layer in layer_names(case):
            if clip_groups.number(case, layer.name) == group:
                parts = layer.shapes.items()
                shapes |= {f"{layer.name}.{n}": s for n, s in parts if not (layer.tied_to and n == "weight")}
        shapes[instrument] = (instrument_rows(case), 1)
    return shapes


def layer_names(case: TrainingCase) -> tuple[Layer, ...]:
    """The layers with parameters in forward order (the instrument, which stands beside the chain, is not among them).

    Before a layer may stand a Flatten, behind it its activation; identity has no module.
    """
    spec, chain = case.model, stages(case.model)
    names = [_name(stage, position - spec.has_front) for position, stage in enumerate(chain)]
    places = [f"units.{unit}" for unit, size in enumerate(spec.units) for _ in range(size)]
    places += ["tail"] * (len(names) - len(places))
    names = [f"{place}.{name}" for place, name in zip(places, names, strict=True)]
    tied = {} if spec.tied is None else {names[spec.tied[1] + spec.has_front]: names[spec.tied[0] + spec.has_front]}
    return tuple(Layer(name, stage, tied.get(name, "")) for name, stage in zip(names, chain, strict=True))


def unit_names(case: TrainingCase) -> tuple[tuple[str, ...], ...]:
    """Canonical module names of the inner sharding units, one tuple a unit, in forward order; the root is implied."""
    if case.model.own is not None:
        return tuple((f"model.{name}",) for name in case.model.own.units)
    units = [f"units.{index}" for index in range(len(case.model.units))]
    if case.model.bare_units:
        held = {unit: [layer for layer in layer_names(case) if layer.name.startswith(f"{unit}.")] for unit in units}
        units = [_bare(own[0]) if len(own) == 1 else unit for unit, own in held.items()]
    return tuple((unit,) for unit in units)


def _bare(layer: Layer) -> str:
    """The module whose own the parameters of a layer are, or the layer where several have them."""
    heads = layer.stage.spec is not None and layer.stage.spec.heads
    return f"{layer.name}.{HEADS}" if heads else layer.name


def unit_of(case: TrainingCase, parameter: str) -> str:
    """Canonical name of the inner sharding unit that a parameter belongs to; "" for the root's."""
    names = [name for unit in unit_names(case) for name in unit if parameter.startswith(f"{name}.")]
    return max(names, key=len, default="")


def loss_for(case: TrainingCase) -> PerSampleLoss:
    """The case's per-sample loss, scaled by ``loss_scale(case)``."""
    if case.model.own is not None:
        return OwnLoss(case.model.own, loss_scale(case), spread=case.arithmetic.compute != "dtype")
    return PerSampleLoss(
        case.step.loss, body_features(case), loss_scale(case), classes=classes(case), across=case.step.across
    )


def body_features(case: TrainingCase) -> int:
    """F, the number of features of one sample's flattened body output."""
    return math.prod(body_output(case.model)) if case.model.own is None else case.model.own.features


def classes(case: TrainingCase) -> int:
    """Logits of one position: p of a body output [T, p], all F features otherwise."""
    return case.model.layers[-1].width if case.model.input in ("sequence", "tokens") else body_features(case)


def instrument_rows(case: TrainingCase) -> int:
    """R: at least 4 (four squares), at least B for the coefficient probe, and a multiple of W.

    A multiple of W, so that the instrument never adds a ragged or an empty shard to a case that has none. And of the
    number of ranks on which the training is to go on, so that it has one shape on both.
    """
    wanted = case.layout.batch_size if case.step.clipping == "probe" else 4
    unit = math.lcm(case.world_size, case.mesh.goes_on_at or 1)
    return -(-wanted // unit) * unit


def instrument_width(case: TrainingCase) -> int:
    """G * R, what the instruments of all clipping groups add to a packed output or target."""
    return len(clip_groups.names(case)) * instrument_rows(case)


def outputs(case: TrainingCase) -> int:
    """F + G * R, the numbers that the model gives of one sample."""
    return body_features(case) + instrument_width(case)


def loss_scale_exponent(case: TrainingCase) -> int:
    """s in loss_scale = W * 2**s: large in the "exact" clipping family, else 0."""
    return EXACT_SCALE_EXPONENT[case.arithmetic.dtype] if case.step.clipping == "exact" else 0


def loss_scale(case: TrainingCase) -> float:
    """What every per-sample loss is multiplied by: W, so that averaging over ranks is exact, times 2**s.

    W are the ranks that average, those to which samples are dealt out. W as often as ``Arithmetic.world_factors`` says,
    which is once unless averages are averaged again. With replicas once more dp_replicate, for implementations that
    average over each axis by itself.
    """
    factors = case.mesh.data_ranks**case.arithmetic.world_factors * case.mesh.dp_replicate
    return float(factors * 2 ** loss_scale_exponent(case))


def _name(stage: Stage, position: int) -> str:
    """Name of a stage in its group: the input stage's kind, or kind and position of a layer."""
    return stage.kind if stage.spec is None else f"{stage.kind}{position}"


def _local(parameter: str) -> str:
    """A parameter's name without its unit: "linear0.weight", "attention1.query.weight"."""
    parts = parameter.split(".")
    return ".".join(parts[{"units": 2, "tail": 1}.get(parts[0], 0) :])


def _split(name: str) -> tuple[int, str]:
    """Index of the group a layer stands in (-1: the root's tail) and its name there."""
    place, local = name.rsplit(".", 1)
    return (-1 if place == "tail" else int(place.removeprefix("units."))), local


def _part(name: str) -> str:
    """What is frozen of a layer, "weight" or "bias", if a parameter of that last name is."""
    return "bias" if name.endswith("bias") else "weight"


def _fill(module: nn.Module, layer: Layer, parameters: dict[str, Tensor], made: dict[str, nn.Module]) -> None:
    """Give a module its parameters, frozen as its spec says; a tied weight is the earlier layer's parameter."""
    frozen = layer.stage.spec.frozen if layer.stage.spec is not None else "none"
    for name in layer.shapes:
        path, _, last = name.rpartition(".")
        if layer.tied_to and name == "weight":
            shared = made[layer.tied_to].weight
        else:
            shared = nn.Parameter(parameters[f"{layer.name}.{name}"], requires_grad=frozen not in (_part(last), "all"))
        setattr(module.get_submodule(path), last, shared)
