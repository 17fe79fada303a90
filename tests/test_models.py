"""The model and loss a case describes, against definitions written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck import layouts, models
from fsdpcheck.case import Arithmetic, BatchLayout, Case, Dtype, LayerSpec, MeshSpec, ModelSpec, StepSpec
from fsdpcheck.models import PerSampleLoss

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
}
CASES = {
    name: Case(spec, MeshSpec(3), BatchLayout(batch_size=5), arithmetic=Arithmetic(weights=3))
    for name, spec in SPECS.items()
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@EVERY
def test_the_model_holds_the_initial_parameters(case: Case) -> None:
    built, wanted = dict(models.build(case).named_parameters()), models.initial_parameters(case)
    assert list(built) == list(wanted) == list(models.parameter_shapes(case))
    for name, value in wanted.items():
        assert torch.equal(built[name], value), name
        assert tuple(value.shape) == models.parameter_shapes(case)[name]
        assert value.abs().max() <= case.arithmetic.weights
        assert torch.equal(value, value.round())


@EVERY
def test_forward_is_the_chain_of_layers(case: Case) -> None:
    model, inputs = models.build(case), layouts.inputs(case)
    output = model(inputs)
    features = models.body_features(case)
    assert output.shape == (5, features + models.instrument_rows(case))
    assert torch.equal(output[:, :features], _by_hand(case, model, inputs).flatten(1))
    assert torch.equal(output[:, features:], model.instrument.weight.T.expand(5, -1))


def _by_hand(case: Case, model: nn.Module, hidden: Tensor) -> Tensor:
    activations = {"relu": F.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.5), "abs": torch.abs}
    activations |= {"hardtanh": lambda x: x.clamp(-4, 4), "identity": lambda x: x}
    for layer in models.layer_names(case):
        weight, bias = _weights(model, layer)
        if layer.kind == "embedding":
            hidden = weight[hidden]
        elif layer.kind == "layer_norm":
            hidden = hidden / hidden.abs() * weight + bias
        else:
            assert layer.spec is not None
            hidden = hidden @ weight.T
            hidden = activations[layer.spec.activation](hidden if bias is None else hidden + bias)
    return hidden


def _weights(model: nn.Module, layer: models.Layer) -> tuple[Tensor, Tensor | None]:
    named = dict(model.named_parameters(remove_duplicate=False))
    assert tuple(named[f"{layer.name}.weight"].shape) == layer.shape
    return named[f"{layer.name}.weight"], named.get(f"{layer.name}.bias")


@EVERY
def test_units_are_modules_that_hold_all_parameters_but_the_roots(case: Case) -> None:
    model = models.build(case)
    units = [name for unit in models.unit_names(case) for name in unit]
    assert len(units) == len(case.model.units)
    for name, size in zip(units, case.model.units, strict=True):
        layers = [layer for layer in models.layer_names(case) if layer.name.startswith(f"{name}.")]
        assert len(layers) == size
        model.get_submodule(name)


@EVERY
def test_a_model_takes_an_empty_batch(case: Case) -> None:
    model, loss = models.build(case), models.loss_for(case)
    inputs = layouts.inputs(case)[:0]
    output = model(inputs)
    assert output.shape == (0, models.body_features(case) + models.instrument_rows(case))
    loss(output, output.detach()).sum().backward()


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


def test_values_do_not_depend_on_the_grouping() -> None:
    grouped = models.initial_parameters(CASES["units"])
    alone = models.initial_parameters(replace(CASES["units"], model=replace(SPECS["units"], units=())))
    assert [value.tolist() for value in grouped.values()] == [value.tolist() for value in alone.values()]


@pytest.mark.parametrize("kind", ["mse", "linear", "hinge", "l1"])
def test_per_sample_losses_are_their_definitions(kind: str) -> None:
    y, t = [[1.0, -2.0, 0.0], [3.0, 1.0, 2.0]], [[0.0, 2.0, -2.0], [3.0, -1.0, 2.0]]
    v, u = [[5.0], [7.0]], [[2.0], [-1.0]]
    wanted = {
        "mse": [0.5 * (1 + 16 + 4), 0.5 * 4],
        "linear": [-4.0, 12.0],
        "hinge": [1.0 + 3.0 + 1.0, 0.0 + 2.0 + 0.0],
        "l1": [1.0 + 4 + 2, 2.0],
    }[kind]
    outputs, targets = torch.tensor([a + b for a, b in zip(y, v)]), torch.tensor([a + b for a, b in zip(t, u)])  # noqa: B905
    loss = PerSampleLoss(kind, 3, scale=4.0)  # type: ignore[arg-type]
    each = [4 * (wanted[0] + 10), 4 * (wanted[1] - 7)]
    assert loss.reduction == "none"
    assert loss(outputs, targets).tolist() == each
    assert loss.with_reduction("sum")(outputs, targets).item() == sum(each)
    assert loss.with_reduction("mean")(outputs, targets).item() == sum(each) / 2
    assert loss.with_reduction("mean").reduction == "mean"


def test_the_instruments_gradient_is_its_target() -> None:
    case = CASES["units"]
    model, rows = models.build(case), models.instrument_rows(case)
    targets_1R = torch.arange(1.0, rows + 1, dtype=torch.float64).reshape(1, rows)
    packed = torch.cat([layouts.targets(case)[:1], targets_1R], dim=1)
    models.loss_for(case)(model(layouts.inputs(case)[:1]), packed).sum().backward()
    assert model.instrument.weight.grad is not None
    assert torch.equal(model.instrument.weight.grad.T, targets_1R * models.loss_scale(case))


@pytest.mark.parametrize("world", range(1, 7))
def test_the_instrument_is_never_ragged(world: int) -> None:
    for clipping in ("none", "unclipped", "exact", "probe"):
        for size in (1, 4, 9):
            step = StepSpec(clipping=clipping)  # type: ignore[arg-type]
            rows = models.instrument_rows(Case(SPECS["one"], MeshSpec(world), BatchLayout("strided", size), step))
            assert rows % world == 0
            assert rows >= (size if clipping == "probe" else 4)


@pytest.mark.parametrize(
    ("clipping", "dtype", "scale"),
    [("none", "float64", 3), ("probe", "float32", 3), ("exact", "float64", 3 * 2**40), ("exact", "float32", 3 * 2**8)],
)
def test_losses_are_multiples_of_the_world_size(clipping: str, dtype: Dtype, scale: int) -> None:
    case = Case(SPECS["one"], MeshSpec(3), step=StepSpec(clipping=clipping), arithmetic=Arithmetic(dtype))  # type: ignore[arg-type]
    assert models.loss_scale(case) == scale
    assert models.loss_for(case).scale == scale
    assert models.build(case).instrument.weight.dtype == models.DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("features", [2, 4, 8, 16])
@pytest.mark.parametrize("exponent", [0, 1, 5, 20])
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
