"""A raised script equals, bit for bit, the same script written in float64, from the same initial numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.comparison.precision.raising import Block, assert_all_is_raised, raised

Result = dict[str, Tensor]


def trained(model: nn.Module, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer) -> Result:
    losses = []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return {**{name: value.detach().clone() for name, value in model.state_dict().items()}, "loss": torch.stack(losses)}


def multilayer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


def floats(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(6, width)


def tokens() -> Tensor:
    return torch.randint(0, 11, (6, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "multilayer": (multilayer, floats(8), 4),
    "convolutional": (convolutional, floats(64), 4),
    "attention": (Block, tokens, 5),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, 0.01, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_a_script_is_raised_to_what_it_is_in_float64(case: str, optimizer: str) -> None:
    build, draw, labels = CASES[case]

    def begun() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        torch.manual_seed(3)
        return build(), [(draw(), torch.randn(6, labels)) for _ in range(3)]

    model, batches = begun()
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    model.double()
    batches = [(one.double() if one.is_floating_point() else one, other.double()) for one, other in batches]
    expected = trained(model, batches, OPTIMIZERS[optimizer](model.parameters()))
    with raised() as notes:
        model, batches = begun()
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        got = trained(model, batches, OPTIMIZERS[optimizer](model.parameters()))
    for name, value in initial.items():
        assert value.dtype == (torch.float64 if value.is_floating_point() else torch.int64)
        assert torch.equal(value, drawn[name].to(value.dtype)), name
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
    assert_all_is_raised(notes)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.half() * 2).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 + 0 * x.bfloat16()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def lowered(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model[0](x)
    return model[1:](hidden.to(torch.bfloat16).to(torch.float32).type(torch.HalfTensor).to(x.dtype))


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "autocast": autocast,
    "casts": lowered,
    "a function of its own": lambda model, x: Doubled.apply(model(x)) / 2,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    "softmax of a type": lambda model, x: torch.softmax(model(x), -1, dtype=torch.float32) * model(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_lower_types_within_a_forward_are_raised(way: str) -> None:
    def gradients(kind: torch.dtype, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = multilayer().to(kind), torch.randn(5, 8).to(kind)
        run(model, x).square().sum().backward()
        return [value.grad for value in model.parameters() if value.grad is not None]

    plain: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
        "softmax of a type": lambda model, x: torch.softmax(model(x), -1) * model(x)
    }
    expected = gradients(torch.float64, plain.get(way, lambda model, x: model(x)))
    with raised() as notes:
        got = gradients(torch.float32, WAYS[way])
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert_all_is_raised(notes)


def test_a_gradient_scaler_scales_in_float64() -> None:
    def run(kind: torch.dtype) -> tuple[list[Tensor], float]:
        torch.manual_seed(1)
        model, x = multilayer().to(kind), torch.randn(3, 5, 8).to(kind)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", growth_interval=2)
        for batch in x:
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [value.detach() for value in model.parameters()], scaler.get_scale()

    expected = run(torch.float64)
    with raised() as notes:
        got = run(torch.float32)
    assert expected[1] == got[1] == 2 * 65536
    assert all(torch.equal(one, other) for one, other in zip(got[0], expected[0], strict=True))
    assert_all_is_raised(notes)


def test_a_gradient_scaler_sees_gradients_that_are_not_finite() -> None:
    with raised():
        parameter = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([parameter], 0.1), torch.amp.GradScaler("cpu")
        scaler.scale(parameter.sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 65536 / 2
        assert parameter.tolist() == [1, 1, 1]
