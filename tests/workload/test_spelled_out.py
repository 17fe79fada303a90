"""Functions that a model spells out: replaced in the forward of its modules, wherever that runs, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpcheck.case import UserModelSpec
from fsdpcheck.workload.user_model import spelled_out
from tests.common.tables import each

OWN = UserModelSpec("model", "batch")
X = torch.randint(-4, 5, (3, 8), generator=torch.Generator().manual_seed(1)).double() + 0.0


class Spelled(nn.Module):
    """A norm and a turn, as models spell them out; ``function`` of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(8).double()), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def squares(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "x * rsqrt": lambda x: x * torch.rsqrt(squares(x)),
    "rsqrt * x": lambda x: squares(x).rsqrt() * x,
    "x / sqrt": lambda x: x / torch.sqrt(squares(x)),
    "x * pow": lambda x: x * torch.pow(squares(x), -0.5),
    "x / **": lambda x: x / squares(x) ** 0.5,
    "torch.mul": lambda x: torch.mul(x, torch.rsqrt(squares(x))),
}


def attached(function: Callable[[Tensor], Tensor], own: UserModelSpec = OWN) -> nn.Module:
    model = nn.Sequential(Spelled(function))
    spelled_out.attach(model, own, surrogates=True)
    return model


@each("name", NORMS)
def test_every_way_to_write_a_norm_gives_halves_near_the_true_ones_and_hands_its_gradient_on(name: str) -> None:
    model, source = attached(NORMS[name]), X.clone().requires_grad_()
    found, true = model(source), NORMS[name](X)
    assert torch.equal(found * 2, (found * 2).round())
    assert float((found - true.clamp(-2, 2)).detach().abs().max()) <= 0.3
    cotangent = torch.arange(24.0).reshape(3, 8).double()
    assert torch.equal(torch.autograd.grad(found, source, cotangent)[0], cotangent)
    assert torch.equal(NORMS[name](X), true)


@pytest.mark.parametrize("name", ["cos", "sin", "rsqrt", "sqrt"])
def test_outside_of_forwards_and_after_one_that_raised_torch_is_itself(name: str) -> None:
    function = getattr(torch, name)
    true = function(X.abs() + 1)

    def fails(x: Tensor) -> Tensor:
        assert not torch.equal(function(X.abs() + 1), true)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        attached(fails)(X)
    assert torch.equal(function(X.abs() + 1), true)


def test_a_forward_that_is_run_again_in_backward_gives_the_same() -> None:
    model = attached(lambda x: NORMS["x * rsqrt"](x) * x.cos())
    plain, again = (X.clone().requires_grad_() for _ in range(2))
    model(plain).sum().backward()
    checkpoint(model[0], again, use_reentrant=False).sum().backward()
    assert plain.grad is not None
    assert bool(plain.grad.any())
    assert again.grad is not None
    assert torch.equal(plain.grad, again.grad)


@pytest.mark.parametrize("largest", [True, False])
def test_of_equal_values_the_first_is_chosen(largest: bool) -> None:
    model = attached(lambda x: torch.topk(torch.zeros_like(x), 3, largest=largest).indices.double() + 0 * x[:, :3])
    assert model(X).tolist() == [[0.0, 1.0, 2.0]] * 3


def test_the_chosen_values_and_gradients_are_torchs_where_none_are_equal() -> None:
    source = (X.argsort(-1) * 2.0 - 7).requires_grad_()
    values, indices = torch.topk(source, 3)
    chosen: list[Tensor] = []

    def top(x: Tensor) -> Tensor:
        found = x.topk(3)
        chosen.append(found.indices)
        return found.values

    given = attached(top)(source)
    assert torch.equal(given, values)
    assert torch.equal(chosen[0], indices)
    of_given, of_values = (torch.autograd.grad(one.square().sum(), source)[0] for one in (given, values))
    assert torch.equal(of_given, of_values)


def test_a_dtype_that_is_named_is_widened_in_float64_alone() -> None:
    seen: list[torch.dtype] = []

    def upcast(x: Tensor) -> Tensor:
        seen.append(x.float().dtype)
        return x

    own = replace(OWN, names="float32")
    attached(upcast, own)(X)
    attached(upcast, own).float()(X.float())
    attached(upcast)(X)
    assert seen == [torch.float64, torch.float32, torch.float32]


def test_on_real_numbers_dtypes_are_widened_and_functions_are_torchs() -> None:
    model = nn.Sequential(Spelled(lambda x: x.float().cos()))
    spelled_out.attach(model, replace(OWN, names="float32"), surrogates=False)
    assert torch.equal(model(X), X.cos())
