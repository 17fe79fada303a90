"""The model and loss a case describes, against definitions written out by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.case import (
    Activation,
    Arithmetic,
    BatchLayout,
    Dtype,
    Freeze,
    InputKind,
    LayerKind,
    LayerSpec,
    Loss,
    MeshSpec,
    ModelSpec,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.case.model import Bags, Mask, PaddingMode
from fsdpcheck.exact import surrogates
from fsdpcheck.workload import batches, layers, models
from fsdpcheck.workload.layers import EPS
from tests.common.tables import each

SPECS = {
    "one": ModelSpec((LayerSpec(1),)),
    "units": ModelSpec((LayerSpec(3, True, "relu"), LayerSpec(2, False, "abs"), LayerSpec(4, True)), units=(1, 2)),
    "tail": ModelSpec((LayerSpec(3), LayerSpec(2, activation="hardtanh")), features=2, units=(1,)),
    "norm": ModelSpec(
        (LayerSpec(3, True, "leaky_relu"),), "sequence", features=4, length=2, layer_norm=True, units=(1, 1)
    ),
    "tokens": ModelSpec((LayerSpec(3),), "tokens", features=2, length=3, vocabulary=5, padding_idx=1, units=(2,)),
    "tied": ModelSpec((LayerSpec(2, True), LayerSpec(2)), features=2, tied=(0, 1), units=(2,)),
    "tied embedding": ModelSpec((LayerSpec(4),), "tokens", features=3, length=2, vocabulary=4, tied=(-1, 0)),
    "frozen": ModelSpec(
        (LayerSpec(2, True, frozen="weight"), LayerSpec(3, True, frozen="bias"), LayerSpec(1, True, frozen="all"))
    ),
    "bags": ModelSpec((LayerSpec(3, True, "softmax"),), "bags", features=2, length=4, vocabulary=5, padding_idx=2),
    "signal": ModelSpec(
        (LayerSpec(4, True, "gelu", kind="conv", kernel=2, stride=2, padding=1, dilation=2, groups=2), LayerSpec(3)),
        "signal",
        features=2,
        length=5,
        units=(1,),
    ),
    "image": ModelSpec(
        (
            LayerSpec(4, kind="conv", kernel=2),
            LayerSpec(2, kind="conv", padding=1),
            LayerSpec(2, True, "silu", kind="group_norm", groups=2),
        ),
        "image",
        features=1,
        length=3,
        units=(2,),
    ),
    "padded by the kernel": ModelSpec(
        (
            LayerSpec(4, True, kind="conv", kernel=2, same=True),
            LayerSpec(2, kind="conv", kernel=2, dilation=2, groups=2, same=True),
        ),
        "image",
        features=2,
        length=3,
    ),
    "padded with what arrives": ModelSpec(
        (
            LayerSpec(2, True, kind="conv", kernel=2, padding=1, padding_mode="reflect"),
            LayerSpec(2, kind="conv", kernel=2, stride=2, padding=2, padding_mode="circular"),
            LayerSpec(2, kind="conv", kernel=2, dilation=2, groups=2, same=True, padding_mode="replicate"),
        ),
        "image",
        features=1,
        length=3,
    ),
    "means of bags": ModelSpec((LayerSpec(3),), "bags", 2, length=3, vocabulary=3, padding_idx=1, bags="mean"),
    "heads": ModelSpec(
        (
            LayerSpec(4, True, kind="attention", heads=2),
            LayerSpec(4, kind="attention", heads=4, frozen="weight", mask="causal"),
            LayerSpec(4, True, kind="attention", heads=1, frozen="bias"),
            LayerSpec(4, used="dropped"),
        ),
        "sequence",
        features=4,
        length=3,
        units=(1, 3),
    ),
    "masks": ModelSpec(
        (
            LayerSpec(4, True, kind="attention", heads=2, mask="causal"),
            LayerSpec(4, True, kind="attention", heads=1, mask="keys"),
            LayerSpec(4, kind="attention", heads=4, mask="both"),
        ),
        "sequence",
        features=4,
        length=3,
    ),
    "volume": ModelSpec(
        (LayerSpec(2, True, kind="conv", kernel=2, frozen="bias"), LayerSpec(2, kind="rms_norm"), LayerSpec(3, True)),
        "volume",
        features=1,
        length=2,
    ),
    "attention": ModelSpec(
        (
            LayerSpec(3, True, "tanh", kind="layer_norm"),
            LayerSpec(3, True, kind="attention"),
            LayerSpec(3, kind="layer_norm"),
            LayerSpec(3, kind="attention", frozen="weight"),
            LayerSpec(2, False, "sigmoid"),
        ),
        "tokens",
        features=3,
        length=4,
        vocabulary=4,
        units=(1, 2, 1),
    ),
}
CASES = {
    name: TrainingCase(spec, MeshSpec(3), BatchLayout(batch_size=5), arithmetic=Arithmetic(weights=3))
    for name, spec in SPECS.items()
}
EVERY = each("case", CASES.values(), ids=CASES.keys())
REAL = [name for name, spec in SPECS.items() if not {layer.mask for layer in spec.layers} & {"keys", "both"}]
"""Those that may have real numbers."""


@EVERY
def test_the_model_holds_the_initial_parameters(case: TrainingCase) -> None:
    built, wanted = dict(models.build(case).named_parameters()), models.initial_parameters(case)
    assert list(built) == list(wanted) == list(models.parameter_shapes(case))
    for name, value in wanted.items():
        assert torch.equal(built[name], value), name
        assert tuple(value.shape) == models.parameter_shapes(case)[name]
        assert value.abs().max() <= case.arithmetic.weights
        assert torch.equal(value, value.round())


@EVERY
def test_forward_is_the_chain_of_layers(case: TrainingCase) -> None:
    model, inputs = models.build(case), batches.inputs(case)
    output = model(inputs)
    features = models.body_features(case)
    assert output.shape == (5, features + models.instrument_rows(case))
    wanted = _by_hand(case, model, inputs).flatten(1)
    if any(layer.heads for layer in case.model.layers):
        torch.testing.assert_close(output[:, :features], wanted)  # heads that are multiplied together round otherwise
    else:
        assert torch.equal(output[:, :features], wanted)
    assert torch.equal(output[:, features:], model.instrument.weight.T.expand(5, -1))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.5),
    "hardtanh": lambda x: x.clamp(-4, 4),
    "abs": torch.abs,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
}


def _by_hand(case: TrainingCase, model: nn.Module, hidden: Tensor) -> Tensor:
    named = dict(model.named_parameters(remove_duplicate=False))
    for layer in models.layer_names(case):
        parameters = {name: named[f"{layer.name}.{name}"] for name in layer.shapes}
        assert {name: tuple(value.shape) for name, value in parameters.items()} == layer.shapes
        hidden = hidden.flatten(1) if layer.stage.flatten else hidden
        assert layer.stage.spec is None or tuple(hidden.shape[1:]) == layer.stage.entering
        given = _layer_by_hand(case, layer, parameters, hidden)
        assert tuple(given.shape[1:]) == layer.stage.leaving
        hidden = hidden if layer.stage.spec is not None and layer.stage.spec.used == "dropped" else given
        hidden = hidden if layer.stage.spec is None else ACTIVATIONS[layer.stage.spec.activation](hidden)
    return hidden


def _layer_by_hand(case: TrainingCase, layer: models.Layer, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    spec = layer.stage.spec
    if spec is not None and spec.heads:
        return _heads_by_hand(parameters, x, spec)
    if layer.kind == "attention":
        return _attention_by_hand(parameters, x)
    weight, bias = parameters["weight"], parameters.get("bias")
    if layer.kind == "embedding":
        return weight[x]
    if layer.kind == "embedding_bag":
        used = (x != case.model.padding_idx).unsqueeze(-1)
        divisors = used.sum(1).clamp(min=1) if case.model.bags == "mean" else 1
        return (weight[x] * used).sum(1) / divisors
    if spec is None:
        assert bias is not None
        return x / x.abs() * weight + bias
    if layer.kind == "linear":
        return _plus(x @ weight.T, bias)
    if layer.kind == "conv":
        y = _convolution_by_hand(spec, weight, x)
        return y if bias is None else y + bias.reshape(-1, *[1] * (x.dim() - 2))
    if layer.kind == "group_norm":
        return F.group_norm(x, spec.groups, weight, bias, EPS)
    if layer.kind == "rms_norm":
        return F.rms_norm(x, (spec.width,), weight, EPS)
    return F.layer_norm(x, (spec.width,), weight, bias, EPS)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _attention_by_hand(parameters: dict[str, Tensor], x_bTd: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return _plus(x @ parameters[f"{name}.weight"].T, parameters.get(f"{name}.bias"))

    scores = linear("query", x_bTd) @ linear("key", x_bTd).mT / 4
    return linear("output", torch.softmax(scores, -1) @ linear("value", x_bTd))


def _heads_by_hand(parameters: dict[str, Tensor], x_bTd: Tensor, spec: LayerSpec) -> Tensor:
    """Each head by itself, on its own rows of the three projections; what is masked has no share."""
    heads, length = spec.heads, x_bTd.shape[1]
    weights, width = parameters["heads.in_proj_weight"].chunk(3), x_bTd.shape[-1] // heads
    left_out = torch.zeros(len(x_bTd), length, length, dtype=torch.bool)
    for sample, position, key in itertools.product(range(len(x_bTd)), range(length), range(length)):
        later = spec.mask in ("causal", "both") and key > position
        negative = spec.mask in ("keys", "both") and key > 0 and bool(x_bTd[sample, key, 0] < 0)
        left_out[sample, position, key] = later or negative
    biases = parameters["heads.in_proj_bias"].chunk(3) if "heads.in_proj_bias" in parameters else (None,) * 3
    q, k, v = (_plus(x_bTd @ weight.T, bias) for weight, bias in zip(weights, biases, strict=True))
    mixed = []
    for own in (slice(head * width, (head + 1) * width) for head in range(heads)):
        scores = (q[..., own] @ k[..., own].mT / width**0.5).masked_fill(left_out, -torch.inf)
        mixed.append(torch.softmax(scores, -1) @ v[..., own])
    return _plus(torch.cat(mixed, -1) @ parameters["heads.out_proj.weight"].T, parameters.get("heads.out_proj.bias"))


def _convolution_by_hand(spec: LayerSpec, weight: Tensor, x: Tensor) -> Tensor:
    """Every output element by itself: the window's products, added up."""
    directions = x.dim() - 2
    reach = spec.dilation * (spec.kernel - 1) + 1
    ends = [(reach - 1) // 2, reach - 1 - (reach - 1) // 2] if spec.same else [spec.padding] * 2
    x = F.pad(x, ends * directions, mode="constant" if spec.padding_mode == "zeros" else spec.padding_mode)
    starts = [range(0, size - reach + 1, spec.stride) for size in x.shape[2:]]
    y = x.new_zeros(len(x), spec.width, *map(len, starts))
    taken, given = x.shape[1] // spec.groups, spec.width // spec.groups
    for place in itertools.product(*(range(len(s)) for s in starts)):
        corner = [s[i] for s, i in zip(starts, place, strict=True)]
        window = x[(slice(None), slice(None), *(slice(c, c + reach, spec.dilation) for c in corner))]
        for channel in range(spec.width):
            first = channel // given * taken
            y[(slice(None), channel, *place)] = (window[:, first : first + taken] * weight[channel]).flatten(1).sum(1)
    return y


def test_a_bare_unit_is_the_module_that_has_the_parameters_of_its_one_layer() -> None:
    layers = (LayerSpec(2), LayerSpec(2, kind="attention", heads=2), LayerSpec(2, True, "relu"), LayerSpec(2))
    case = TrainingCase(ModelSpec(layers, "sequence", features=2, units=(1, 1, 2), bare_units=True))
    model = models.build(case)
    bare = {name: model.get_submodule(name) for (name,) in models.unit_names(case)}
    kinds = {name: type(unit) for name, unit in bare.items()}
    assert kinds == {
        "units.0.linear0": nn.Linear,
        "units.1.attention1.heads": nn.MultiheadAttention,
        "units.2": nn.Sequential,
    }
    held = {name: parameter for name, parameter in model.named_parameters() if not name.startswith(("tail", "instr"))}
    assert {name for unit in bare for name in held if name.startswith(f"{unit}.")} == held.keys()


def test_every_kind_of_layer_input_and_activation_is_among_the_models() -> None:
    used = [layer for spec in SPECS.values() for layer in spec.layers]
    assert {layer.kind for layer in used} == set(get_args(LayerKind))
    assert {layer.activation for layer in used} == set(get_args(Activation)) == set(ACTIVATIONS)
    assert {spec.input for spec in SPECS.values()} == set(get_args(InputKind))
    assert {spec.bags for spec in SPECS.values()} == set(get_args(Bags))
    assert {layer.heads for layer in used} == {0, 1, 2, 4}
    assert {layer.same for layer in used} == {False, True}
    assert {layer.padding_mode for layer in used} == set(get_args(PaddingMode))
    assert {layer.mask for layer in used} == set(get_args(Mask))


@EVERY
def test_units_are_modules_that_hold_all_parameters_but_the_roots(case: TrainingCase) -> None:
    model = models.build(case)
    units = [name for unit in models.unit_names(case) for name in unit]
    assert len(units) == len(case.model.units)
    for name, size in zip(units, case.model.units, strict=True):
        layers = [layer for layer in models.layer_names(case) if layer.name.startswith(f"{name}.")]
        assert len(layers) == size
        model.get_submodule(name)


@EVERY
@each("loss", get_args(Loss))
def test_a_model_takes_an_empty_batch(case: TrainingCase, loss: Loss) -> None:
    case = replace(case, step=StepSpec(loss))
    model = models.build(case)
    inputs = batches.inputs(case)[:0]
    output = model(inputs)
    assert output.shape == (0, models.body_features(case) + models.instrument_rows(case))
    models.loss_for(case)(output, output.detach()).sum().backward()
    unused = {
        layer.name for layer in models.layer_names(case) if layer.stage.spec and layer.stage.spec.used == "dropped"
    }
    for name, value in model.named_parameters():
        if name.rpartition(".")[0] in unused:
            assert value.grad is None, name
            continue
        assert not value.requires_grad or (value.grad is not None and not value.grad.any()), name


@EVERY
def test_a_model_takes_a_single_sample(case: TrainingCase) -> None:
    output = models.build(case)(batches.inputs(case)[:1])
    assert output.shape == (1, models.body_features(case) + models.instrument_rows(case))
    assert output.isfinite().all()


def test_building_leaves_the_random_streams_alone() -> None:
    before = torch.get_rng_state()
    models.build(CASES["norm"])
    models.build(CASES["tokens"])
    assert torch.equal(before, torch.get_rng_state())


def test_no_two_builds_share_memory() -> None:
    one, two = models.build(CASES["units"]), models.build(CASES["units"])
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.fill_(99.0)
    assert all(float(p.detach().abs().max()) <= 3 for p in two.parameters())


def test_tied_layers_share_one_parameter_named_after_the_first() -> None:
    model = models.build(CASES["tied"])
    assert model.get_submodule("units.0.linear0").weight is model.get_submodule("units.0.linear1").weight
    assert "units.0.linear1.weight" not in models.initial_parameters(CASES["tied"])
    model = models.build(CASES["tied embedding"])
    assert model.get_submodule("tail.embedding").weight is model.get_submodule("tail.linear0").weight


def test_frozen_parameters_have_no_gradient() -> None:
    trained = {name for name, value in models.build(CASES["frozen"]).named_parameters() if value.requires_grad}
    assert trained == {"tail.linear0.bias", "tail.linear1.weight", "instrument.weight"}


@EVERY
def test_names_and_values_do_not_depend_on_the_grouping(case: TrainingCase) -> None:
    grouped = models.initial_parameters(case)
    alone = models.initial_parameters(replace(case, model=replace(case.model, units=())))
    assert [value.tolist() for value in grouped.values()] == [value.tolist() for value in alone.values()]
    inside = [[name.split(".")[2 if name.startswith("units") else 1 :] for name in found] for found in (grouped, alone)]
    assert inside[0] == inside[1]


@each("name", REAL)
@each("dtype", ["float64", "float32"])
def test_real_numbers_are_fractions_of_many_bits_in_the_same_ranges(name: str, dtype: Dtype) -> None:
    case = replace(CASES[name], arithmetic=Arithmetic(dtype, 3, 2, project=False, numbers="real"))
    bounds = [(value, 3) for value in models.initial_parameters(case).values()]
    bounds += [(batches.targets(case), 3)]
    bounds += [] if case.model.input in ("tokens", "bags") else [(batches.inputs(case), 2)]
    for value, bound in bounds:
        assert value.dtype == models.DTYPES[dtype]
        assert value.abs().max() <= bound
        assert torch.equal(value * 2**30, (value * 2**30).round())
    fractional = torch.cat([value.flatten() * 2**12 for value, _ in bounds])
    assert (fractional != fractional.round()).sum() > 0.9 * len(fractional)
    assert models.build(case)(batches.inputs(case)).isfinite().all()


def test_the_instruments_gradient_is_its_target() -> None:
    case = CASES["units"]
    model, rows = models.build(case), models.instrument_rows(case)
    targets_1R = torch.arange(1.0, rows + 1, dtype=torch.float64).reshape(1, rows)
    packed = torch.cat([batches.targets(case)[:1], targets_1R], dim=1)
    models.loss_for(case)(model(batches.inputs(case)[:1]), packed).sum().backward()
    assert model.instrument.weight.grad is not None
    assert torch.equal(model.instrument.weight.grad.T, targets_1R * models.loss_scale(case))


@pytest.mark.parametrize("world", range(1, 7))
def test_the_instrument_is_never_ragged(world: int) -> None:
    for clipping in ("none", "unclipped", "exact", "probe"):
        for size in (1, 4, 9):
            step = StepSpec(clipping=clipping)  # type: ignore[arg-type]
            rows = models.instrument_rows(
                TrainingCase(SPECS["one"], MeshSpec(world), BatchLayout("strided", size), step)
            )
            assert rows % world == 0
            assert rows >= (size if clipping == "probe" else 4)


@pytest.mark.parametrize(
    ("clipping", "dtype", "scale"),
    [("none", "float64", 3), ("probe", "float32", 3), ("exact", "float64", 3 * 2**40), ("exact", "float32", 3 * 2**8)],
)
def test_losses_are_multiples_of_the_world_size(clipping: str, dtype: Dtype, scale: int) -> None:
    case = TrainingCase(SPECS["one"], MeshSpec(3), step=StepSpec(clipping=clipping), arithmetic=Arithmetic(dtype))  # type: ignore[arg-type]
    assert models.loss_scale(case) == scale
    assert models.loss_for(case).scale == scale
    assert models.build(case).instrument.weight.dtype == models.DTYPES[dtype]


@each("dtype", [torch.float64, torch.float32])
@each("features", [2, 4, 8, 16])
@each("exponent", [0, 1, 5, 20])
def test_layer_norm_of_balanced_rows_is_exact(features: int, exponent: int, dtype: torch.dtype) -> None:
    signs = torch.tensor([1.0, -1.0], dtype=dtype).repeat(features // 2)
    signs_BTd = torch.stack([signs.roll(shift) for shift in range(6)]).reshape(3, 2, features)
    weight = nn.Parameter(torch.ones(features, dtype=dtype))
    bias = nn.Parameter(torch.zeros(features, dtype=dtype))
    output = F.layer_norm(signs_BTd * 2.0**exponent, (features,), weight, bias, 0.0)
    assert torch.equal(output, signs_BTd)
    cotangent = torch.arange(6.0 * features, dtype=dtype).reshape(output.shape) - 7
    output.backward(cotangent)
    assert torch.equal(weight.grad, (cotangent * signs_BTd).sum((0, 1)))  # type: ignore[arg-type]
    assert torch.equal(bias.grad, cotangent.sum((0, 1)))  # type: ignore[arg-type]


def test_models_of_one_case_share_nothing() -> None:
    """What one rank does to its parameters in place, another rank's, built later, does not have."""
    case = TrainingCase(ModelSpec((LayerSpec(2, bias=True), LayerSpec(3)), features=2))
    first = models.build(case)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(100)
    second = models.build(case)
    assert all(bool((parameter.abs() <= 1).all()) for parameter in second.parameters())
    batches.targets(case).add_(100)
    assert bool((batches.targets(case).abs() <= 2).all())


def test_layers_are_exactly_those_of_torch() -> None:
    """Registries of private-training libraries are keyed by the exact type, and read the attributes it sets."""
    made, wanted = layers.linear(3, 4, True), torch.nn.Linear(3, 4, device="meta")
    assert type(made) is torch.nn.Linear
    assert made.__dict__.keys() == wanted.__dict__.keys()
    assert repr(made) == repr(wanted)
    assert all(type(mine) is type(theirs) for mine, theirs in zip(made.parameters(), wanted.parameters(), strict=True))


def _named_calls(model: nn.Module) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))  # type: ignore[misc]
    return calls


def test_samples_leave_a_routed_layer_out_each_by_itself() -> None:
    """Above zero is inside; a forward of which nobody is does not call it, one without samples neither."""
    case = TrainingCase(ModelSpec((LayerSpec(2, True, used="routed"), LayerSpec(2)), features=2, units=(1,)))
    model = models.build(case)
    layer, last = model.get_submodule("units.0.linear0"), model.get_submodule("tail.linear1")
    inputs = torch.tensor([[1.0, 5.0], [0.0, 7.0], [-1.0, 9.0]], dtype=torch.float64)
    hidden = torch.stack([layer(inputs[0]), inputs[1], inputs[2]])
    calls = _named_calls(model)
    assert torch.equal(model(inputs)[:, :2], last(hidden))
    assert calls["units.0.linear0"] == 1
    calls.clear()
    assert torch.equal(model(inputs[1:])[:, :2], last(inputs[1:]))
    assert model(inputs[:0]).shape == (0, 2 + models.instrument_rows(case))
    assert calls["units.0.linear0"] == 0


def test_a_layer_that_is_used_twice_runs_on_what_it_gave() -> None:
    model = models.build(TrainingCase(ModelSpec((LayerSpec(2, True, used="twice"), LayerSpec(1)), features=2)))
    layer, last = model.get_submodule("tail.linear0"), model.get_submodule("tail.linear1")
    inputs = torch.tensor([[1.0, 5.0], [0.0, 7.0]], dtype=torch.float64)
    calls = _named_calls(model)
    assert torch.equal(model(inputs)[:, :1], last(layer(layer(inputs))))
    assert calls["tail.linear0"] == 4


def test_what_nothing_uses_runs_all_the_same() -> None:
    model = models.build(TrainingCase(ModelSpec((LayerSpec(2, used="dropped"), LayerSpec(1)), features=2)))
    last, inputs = model.get_submodule("tail.linear1"), torch.tensor([[1.0, 5.0]], dtype=torch.float64)
    calls = _named_calls(model)
    assert torch.equal(model(inputs)[:, :1], last(inputs))
    assert calls["tail.linear0"] == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part", ["weight", "bias", "all"])
def test_what_is_frozen_of_several_heads(part: Freeze, bias: bool) -> None:
    layer = LayerSpec(2, bias, frozen=part, kind="attention", heads=2)
    model = models.build(TrainingCase(ModelSpec((layer,), "sequence", features=2, length=2)))
    for name, value in model.get_submodule("tail.attention0").named_parameters():
        own = "bias" if name.endswith("bias") else "weight"
        assert value.requires_grad == (part not in (own, "all")), name


@pytest.mark.parametrize("name", ["image", "volume", "attention"])
def test_no_drawn_norm_has_the_eps_that_torch_would_give_it(name: str) -> None:
    """So that a rule which takes a constant for the layer's own is seen."""
    found = [module.eps for module in models.build(TrainingCase(SPECS[name])).modules() if hasattr(module, "eps")]
    assert set(found) == {EPS}
    assert EPS > 1e-2


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("largest", [1, 3])
def test_the_default_eps_gives_most_rows_of_small_integers_other_values_on_the_grid(kind: str, largest: int) -> None:
    """In a case of integers an eps shows only where a value comes to lie on another point of a coarse grid."""
    rows = torch.randint(-largest, largest + 1, (400, 4), generator=torch.Generator().manual_seed(3)).double()
    own, others = (_normalised(kind, rows, eps) for eps in (EPS, 1e-5))
    assert (own != others).any(1).double().mean() > 0.5
    assert (own == 0).all(1).double().mean() < 0.1


def _normalised(kind: str, rows: Tensor, eps: float) -> Tensor:
    with surrogates.installed():
        if kind == "layer_norm":
            return F.layer_norm(rows, (4,), eps=eps)
        return F.rms_norm(rows, (4,), eps=eps)


def test_a_layer_across_samples_gives_one_what_the_one_before_gets_too() -> None:
    once, across, reordered = (
        models.build(TrainingCase(ModelSpec((LayerSpec(2, used=used), LayerSpec(1)), features=2)))  # type: ignore[arg-type]
        for used in ("once", "across", "reordered")
    )
    x, given = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 2.0]], dtype=torch.float64), []
    first, second = once.tail[0](x), across.tail[1]
    assert torch.equal(across.tail(x), second(first + first[[2, 0, 1]]))
    reordered.tail[0].register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
    assert torch.equal(reordered.tail(x), once.tail(x))
    assert torch.equal(given[0], x[[2, 0, 1]])
