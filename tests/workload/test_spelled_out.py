"""Functions that a model spells out: replaced in the forward of its modules, wherever that runs, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from fsdpcheck.case import UserModelSpec
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.surrogates import spelled_out as operators
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


WEIGHTS = torch.tensor([[0.5, 0.25, 1.0, 0.0], [0.25, 0.25, 0.25, 0.0], [1.0, 0.5, 0.5, 0.75]]).double()


def in_place(x: Tensor) -> Tensor:
    given = x * 1
    given /= given.sum(-1, keepdim=True)
    return given


SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "x / sum": lambda x: x / x.sum(-1, keepdim=True),
    "/=": in_place,
    "torch.div": lambda x: torch.div(x, torch.sum(x, -1, True)),
    "x / (sum + eps)": lambda x: x / (x.sum(dim=-1, keepdim=True) + 1e-20),
    "x / clamped": lambda x: x / x.sum(-1, keepdim=True).clamp(min=1e-9),
}


@each("name", SHARES)
def test_every_way_to_share_out_gives_quarters_near_the_true_shares_and_gradients_of_few_bits(name: str) -> None:
    """g 2^-k - sum(g s) 2^-k: the true formula with a power of two within a factor 1.6 of one over the sum."""
    model, source = attached(SHARES[name]), torch.cat([WEIGHTS, WEIGHTS.flip(1)], 1).requires_grad_()
    found, true = model(source), SHARES[name](source.detach())
    assert torch.equal(found * 4, (found * 4).round())
    assert float((found.detach() - true).abs().max()) <= 0.15
    cotangent = torch.arange(24.0).reshape(3, 8).double()
    near = torch.tensor([[0.5], [1.0], [0.5]]).double()  # 1 / 3.5 may not be less than one half
    wanted = near * (cotangent - (cotangent * found.detach()).sum(-1, keepdim=True))
    assert torch.equal(torch.autograd.grad(found, source, cotangent)[0], wanted)


def test_shares_of_nothing_are_nothing_and_of_no_number_no_number() -> None:
    model = attached(SHARES["x / sum"])
    none, poisoned = torch.zeros(1, 8).double().requires_grad_(), torch.full((1, 8), float("nan")).double()
    model(none).sum().backward()
    assert none.grad is not None
    assert not bool(none.grad.any())
    assert not bool(model(none).any())
    assert bool(model(poisoned).isnan().all())


@pytest.mark.parametrize(
    "function", [lambda x: x / x.sum(-1)[:, None], lambda x: x / (x.sum(-1, keepdim=True) + 1.0), lambda x: x / (x + 9)]
)
def test_other_quotients_are_torchs_own(function: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(attached(function)(X.abs() + 1), function(X.abs() + 1))


def test_a_forward_that_is_called_past_the_hooks_is_the_same() -> None:
    """As who takes per-sample gradients of a layer by itself calls it; other modules of the class are as before."""
    model, name = attached(NORMS["x * rsqrt"]), "x * rsqrt"
    layer, wanted = model[0], model(X)
    weight = {"weight": layer.weight.detach()}
    assert torch.equal(layer.forward(X), wanted)
    assert torch.equal(functional_call(layer, weight, (X,)), wanted)
    assert torch.equal(vmap(lambda row: functional_call(layer, weight, (row,)))(X), wanted)
    assert torch.equal(Spelled(NORMS[name]).forward(X), NORMS[name](X))
    moved = copy.deepcopy(layer)
    with torch.no_grad():
        moved.weight.mul_(0)
    assert not bool(moved.forward(X).any())
    assert torch.equal(layer.forward(X), wanted)


def test_tables_are_rounded_as_cosines_are_and_none_of_their_values_is_in_doubt() -> None:
    """0.275 stands at a decision; it is the same number for everybody, as a cosine that is computed may not be."""
    before = surrogates.doubts.count
    table = torch.tensor([[0.275, -0.9, 0.3], [0.1, 1.0, -0.2]]).double()
    assert operators.is_table(table)
    assert operators.rounded_table(table)[:, 1:].tolist() == [[-1.0, 0.5], [1.0, 0.0]]
    turns = operators.rounded_table(torch.polar(torch.ones(2), torch.tensor([0.0, 2.0])))
    assert torch.view_as_real(turns).tolist() == [[1.0, 0.0], [-0.5, 1.0]]
    assert surrogates.doubts.count == before
    for no_table in (table * 2, table[0], (table * 2).round() / 2, torch.zeros(2, 2, dtype=torch.int64)):
        assert not operators.is_table(no_table)


@each("name", operators.OPERATORS)
def test_under_vmap_each_operator_gives_what_it_gives_row_by_row(name: str) -> None:
    operator, rows = getattr(operators, name), X.abs() + 1
    of_two = name in ("over_root", "share")
    given = (rows, rows.sum(-1, keepdim=True)) if of_two else (rows,)
    assert torch.equal(vmap(operator)(*given), operator(*given))
    assert torch.equal(vmap(operator, 1, 1)(*(one.T for one in given)), operator(*given).T)
    if of_two:
        assert torch.equal(vmap(operator, (None, 0))(rows[0], given[1]), operator(rows[0].expand(3, 8), given[1]))


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
