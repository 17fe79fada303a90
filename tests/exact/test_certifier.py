"""The certifier: what it accepts has the same bits in every order, and what it cannot prove it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.certifier import BFLOAT16, FLOAT32, FLOAT64, TF32, Certifier, Precision
from fsdpcheck.exact.grid import bits, grid_exponent
from fsdpcheck.exact.operators import RULES, Inexact, Operand, constant
from tests.common.tables import each

_aten = torch.ops.aten


def integers(*shape: int, seed: int = 0, bound: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=draw).double()


def operand(value: Tensor) -> Operand:
    return Operand(value.abs(), grid_exponent(value), value)


A, B, C = integers(4, 6), integers(6, 5, seed=1), integers(4, 5, seed=2)
IMAGE, KERNEL = integers(2, 4, 5, 5), integers(6, 2, 3, 3, seed=1)
GEOMETRY = ([2, 1], [1, 1], [1, 1], False, [0, 0], 2)
REDUCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[object, ...]]] = {
    "sum": (_aten.sum.default, (A,)),
    "sum.dim": (_aten.sum.dim_IntList, (A, [0])),
    "mean": (_aten.mean.dim, (A, [0])),
    "mm": (_aten.mm.default, (A, B)),
    "bmm": (_aten.bmm.default, (A.expand(3, 4, 6), B.expand(3, 6, 5))),
    "addmm": (_aten.addmm.default, (C, A, B)),
    "mv": (_aten.mv.default, (A, B[:, 0])),
    "convolution": (_aten.convolution.default, (IMAGE, KERNEL, integers(6, seed=3), *GEOMETRY)),
    "embedding": (
        _aten.embedding_dense_backward.default,
        (integers(3, 4, 2), torch.arange(12).view(3, 4) % 5, 5, 1, False),
    ),
    "add": (_aten.add.Tensor, (C, A @ B)),
    "mul": (_aten.mul.Tensor, (C, C * 0.5)),
}


@each("name", REDUCTIONS)
def test_a_rule_bounds_the_result_and_its_grid_holds_it(name: str) -> None:
    function, arguments = REDUCTIONS[name]
    operands = [operand(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    (bound,) = RULES[function](*operands)
    result = function(*arguments)
    assert bound is not None
    assert bound.terms.shape == result.shape
    assert bool((result.abs() <= bound.terms).all())
    assert grid_exponent(result) >= bound.exponent
    positive = [a.abs() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    if name not in ("mul", "mean"):  # of positive terms the largest partial sum is the result: the bound is no smaller
        assert torch.equal(function(*positive), bound.terms)


@each("negative", [False, True])
def test_shares_and_their_inverses_are_bounded_where_the_surrogates_are_in_place(negative: bool) -> None:
    x, total = A, A.sum(1, keepdim=True) * (-1 if negative else 1)
    share, inverse = torch.ops.fsdpcheck.share.default, torch.ops.fsdpcheck.inverse.default
    with pytest.raises(Inexact, match="leaves every grid"):
        RULES[share](operand(x), operand(total))
    with surrogates.installed():
        for (bound,), result in (
            (RULES[share](operand(x), operand(total)), share(x, total)),
            (RULES[inverse](operand(total)), inverse(total)),
        ):
            assert bound is not None
            assert bool((result.abs() <= bound.terms).all())
            assert grid_exponent(result) >= bound.exponent
            assert bool(result.any())


def test_convolution_backward_is_bounded_for_all_three() -> None:
    grad = integers(*_aten.convolution.default(IMAGE, KERNEL, None, *GEOMETRY).shape, seed=5)
    rest = ([6], *GEOMETRY, [True, True, True])
    bounds = RULES[_aten.convolution_backward.default](operand(grad), operand(IMAGE), operand(KERNEL), *rest)
    for bound, result in zip(bounds, _aten.convolution_backward.default(grad, IMAGE, KERNEL, *rest), strict=True):
        assert bound is not None
        assert bool((result.abs() <= bound.terms).all())
        assert grid_exponent(result) >= bound.exponent


def any_order(terms: list[float], dtype: torch.dtype, draw: random.Random) -> float:
    """Their sum in a random order and bracketing, in ``dtype``."""
    values = [torch.tensor(term, dtype=dtype) for term in terms]
    while len(values) > 1:
        one, two = (values.pop(draw.randrange(len(values))) for _ in range(2))
        values.append(one + two)
    return float(values[0])


@pytest.mark.parametrize("scale", [1.0, 2.0**11, 2.0**12 + 1])
def test_accepted_sums_have_one_value_in_every_order_and_refused_ones_may_not(scale: float) -> None:
    draw = random.Random(0)
    factors = integers(40, seed=7, bound=9) * scale, integers(40, seed=8, bound=9) * scale
    terms = (factors[0] * factors[1]).tolist()
    values = {any_order(terms, torch.float32, draw) for _ in range(200)}
    certifier = Certifier(FLOAT32, "test")
    try:
        with certifier:
            torch.mv(factors[0].unsqueeze(0), factors[1])
    except NotExact:
        assert scale > 2.0**12
        assert len(values) > 1
    else:
        assert len(values) == 1


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=number))
    return model


def certify(model: nn.Module, x: Tensor, precision: Precision = FLOAT64) -> dict[str, int]:
    certifier = Certifier(precision, "test")
    with certifier:
        output = model(x)
        certifier.stage = "backward"
        torch.autograd.grad(output, list(model.parameters()), torch.ones_like(output))
    return certifier.used


def test_forward_and_backward_of_a_model_are_certified() -> None:
    used = certify(mlp(), integers(7, 4, seed=9))
    assert {"forward addmm", "backward mm", "backward sum"} <= used.keys()


@pytest.mark.parametrize("position", range(4))
def test_a_parameter_that_is_not_dyadic_is_refused_wherever_it_stands(position: int) -> None:
    model = mlp()
    with torch.no_grad():
        list(model.parameters())[position].view(-1)[0] += 0.1
    with pytest.raises(NotExact, match=r"needs \d+ bits; had 53"):
        certify(model, integers(7, 4, seed=9))


def test_a_hundred_and_twenty_inputs_that_are_not_dyadic_are_refused() -> None:
    for seed in range(120):
        x = integers(3, 4, seed=seed)
        x[seed % 3, seed % 4] += 0.1
        with pytest.raises(NotExact):
            certify(mlp(), x)


@pytest.mark.parametrize(
    ("precision", "largest"), [(TF32, 2**11), (BFLOAT16, 2**8)], ids=["tf32 factors", "bfloat16 factors"]
)
def test_factors_must_fit_the_operands_of_the_arithmetic(precision: Precision, largest: int) -> None:
    fits, too_wide = torch.tensor([[largest - 1.0]]).double(), torch.tensor([[largest + 1.0]]).double()
    one = torch.ones(1, 1).double()
    with Certifier(precision, "test"):
        fits @ one
    with pytest.raises(NotExact, match="factors of mm"), Certifier(precision, "test"):
        too_wide @ one


def test_results_must_fit_too_where_the_arithmetic_rounds_them() -> None:
    wide, ones = torch.tensor([[255.0, 2.0]]).double(), torch.ones(2, 1).double()
    with pytest.raises(NotExact, match="result of mm"), Certifier(BFLOAT16, "test"):
        wide @ ones


def test_convolutions_may_add_up_in_results() -> None:
    """As columns of windows, or from sample to sample: a matrix product of the same numbers has its accumulator."""
    wide, ones = torch.tensor([[[255.0, 2.0, -255.0]]]).double(), torch.ones(1, 1, 3).double()
    with Certifier(BFLOAT16, "test"):
        wide[0] @ ones[0].T
    with Certifier(FLOAT32, "test"):
        torch.conv1d(wide, ones)
    with pytest.raises(NotExact, match="forward convolution: needs 10 bits; had 8"), Certifier(BFLOAT16, "test"):
        torch.conv1d(wide, ones)


@each(
    ("compute", "words"),
    [
        (lambda x: torch.erfinv(x), "aten.erfinv.default: it has no rule"),
        (lambda x: torch.exp(x), "aten.exp.default: it has no rule"),
        (lambda x: torch.rand_like(x), "rand_like"),
        (lambda x: x / 3, "aten.div.Tensor: it divides by a number that is no power of two"),
        (lambda x: x[:3].mean(), "mean of 3 values"),
        (lambda x: x**0.5, "takes the power 0.5"),
        (lambda x: F.gelu(x), "aten.gelu.default: it leaves every grid; next: draw with surrogates"),
        (lambda x: F.cross_entropy(x.view(1, -1), torch.tensor([0])), "leaves every grid"),
    ],
)
def test_what_no_grid_holds_is_refused_and_named(compute: Callable[[Tensor], Tensor], words: str) -> None:
    x = torch.arange(4, dtype=torch.float64)
    with pytest.raises(NotExact, match=words.replace(".", r"\.")), Certifier(FLOAT64, "test"):
        compute(x)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_gradients_of_rows_over_their_frequency_are_refused(by_frequency: bool) -> None:
    """Token 1 occurs three times: its row is a third of a sum, on no grid. Sums alone are certified."""
    tokens, table = torch.tensor([1, 1, 1, 0]), integers(2, 3, seed=4).requires_grad_()
    refused = pytest.raises(NotExact, match=r"embedding_dense_backward.*scale_grad_by_freq")
    with Certifier(FLOAT64, "test"), refused if by_frequency else nullcontext():
        output = F.embedding(tokens, table, scale_grad_by_freq=by_frequency)
        (gradient,) = torch.autograd.grad(output.sum(), table)
    assert by_frequency or gradient[:, 0].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"scale_grad_by_freq": True}, "does not just add up or average"),
        ({"mode": "max"}, "does not just add up or average"),
        ({"mode": "mean"}, "averages rows of a bag whose number is no power of two"),
    ],
)
def test_bags_that_divide_are_refused(option: dict[str, object], words: str) -> None:
    tokens, table = torch.tensor([[1, 1, 1]]), integers(2, 3, seed=4).requires_grad_()
    with pytest.raises(NotExact, match=words), Certifier(FLOAT64, "test"):
        F.embedding_bag(tokens, table, **{"mode": "sum", **option})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by_frequency", "mode", "words"),
    [(True, 0, "does not just"), (False, 1, "no power of two"), (False, 2, "not just")],
)
def test_so_are_their_gradients(by_frequency: bool, mode: int, words: str) -> None:
    bags = torch.zeros(3, dtype=torch.int64)
    rest = (torch.ones(3, dtype=torch.int64), bags, torch.tensor([3]), torch.empty(0), 2, by_frequency, mode, None)
    with pytest.raises(Inexact, match=words):
        RULES[_aten._embedding_bag_dense_backward.default](operand(integers(1, 3)), *rest)


def test_a_view_of_a_gradient_moves_its_bound_whatever_the_strides_are_of_what_bounds_it() -> None:
    """Of the heads of an attention: a product's gradient lies in other strides than its bound."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(parameter.mul(8).round())
    attention.in_proj_weight.requires_grad_(False)
    x = integers(3, 4, 4, seed=5).requires_grad_()
    with surrogates.installed(), Certifier(FLOAT64, "test") as certifier:
        certifier.stage = "backward"
        output = F.gelu(attention(x, x, x, need_weights=False)[0])
        (gradient,) = torch.autograd.grad(output.sum(), x)
    assert bool((certifier.bound(gradient).terms >= gradient.abs()).all())


def test_what_is_read_off_a_part_of_memory_is_refused_behind_the_forward() -> None:
    drawn = integers(4, 3)
    with Certifier(FLOAT64, "test") as certifier:
        certifier.stage = "backward"
        doubled = drawn * 2
        turned = doubled.as_strided((3, 4), (1, 3))
        with pytest.raises(NotExact, match=r"as_strided.*reads memory that it shares"):
            doubled[1:].as_strided((2,), (1,))
    assert torch.equal(turned, 2 * drawn.T)
    assert torch.equal(certifier.bound(turned).terms, 2 * drawn.T.abs())


@pytest.mark.parametrize("name", ["_embedding_bag_dense_backward", "_embedding_bag_backward"])
def test_gradients_of_means_lie_on_a_finer_grid_by_either_operator(name: str) -> None:
    """Of a bag of four rows and one of two, whose offsets the composite operator asks for besides."""
    tokens, bags = torch.tensor([1, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    offsets = () if "dense" in name else (torch.tensor([0, 4]),)
    rest = (tokens, *offsets, bags, torch.tensor([4, 2]), torch.empty(0, dtype=torch.int64), 2, False, 1)
    last = (None, -1) if "dense" in name else (False, None, -1)
    (bound,) = RULES[getattr(_aten, name).default](operand(torch.ones(2, 3, dtype=torch.float64)), *rest, *last)
    assert bound is not None
    assert bound.exponent == -2
    assert bound.terms[:, 0].tolist() == [0.25 + 0.5, 0.75 + 0.5]


def test_means_over_bags_of_one_two_and_four_rows_are_certified_with_the_bits_that_they_take() -> None:
    """Rows of odd numbers, and a token that is in no bag: quarters of them, and of a gradient of ones."""
    tokens = torch.tensor([[1, 2, 2, 3], [1, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    table = torch.tensor([[8.0], [1.0], [3.0], [6.0]], dtype=torch.float64, requires_grad=True)
    with Certifier(FLOAT64, "test") as certifier:
        means = F.embedding_bag(tokens, table, mode="mean", padding_idx=0)
        (gradient,) = torch.autograd.grad(means.sum(), table)
    assert means.flatten().tolist() == [3.25, 2, 6, 0]
    assert gradient.flatten().tolist() == [0, 0.75, 1, 1.25]
    assert [certifier.bound(value).exponent for value in (means, gradient)] == [-2, -2]
    assert bool((certifier.bound(gradient).terms >= gradient.abs()).all())


def test_a_user_model_with_norms_attention_and_convolution_is_certified_under_surrogates() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv1d(2, 4, 3, padding=1), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(F.gelu(self.conv(x)).transpose(1, 2))
            return F.log_softmax(self.out(hidden + F.scaled_dot_product_attention(hidden, hidden, hidden)), -1)

    model = Model().double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=number, bound=1))
    with surrogates.installed():
        used = certify(model, integers(3, 2, 4, seed=9, bound=2))
    assert {
        "forward convolution",
        "backward native_layer_norm_backward",
        "backward _softmax_backward_data",
    } <= used.keys()


def test_paths_add_up_the_absolute_values_of_all_ways_to_the_loss() -> None:
    first, second = torch.tensor([[2.0, -3.0]]).double().requires_grad_(), torch.tensor([[1.0], [-1.0]]).double()
    hidden = first * torch.tensor([[1.0, 1.0]]).double()
    output = (hidden @ second) - (hidden @ second)
    with Certifier(Precision(1 << 20, 1 << 20, 1 << 20), "test", stage="backward", paths=True) as certifier:
        (gradient,) = torch.autograd.grad(output.sum(), first)
        bound = certifier.bound(gradient)
    assert not bool(gradient.any())
    assert bound.terms.tolist() == [[2.0, 2.0]]


def test_paths_go_on_through_products_whose_values_cancel() -> None:
    """x (1) (1, -1) with weights of 1: the gradient with respect to the product between is 1 - 1 along two paths."""
    first, x = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    outputs = (x @ first) @ torch.tensor([[1.0, -1.0]]).double()
    with Certifier(FLOAT64, "test", stage="backward", paths=True) as certifier:
        (gradient,) = torch.autograd.grad(outputs.sum(), x)
    assert (gradient.item(), certifier.bound(gradient).terms.item()) == (0.0, 2.0)


@pytest.mark.parametrize("value", [1.0, -0.5, 3.0, 0.375, -6.0, 0.0])
def test_constants_have_their_grid(value: float) -> None:
    found = constant(value)
    assert float(found.magnitude) == abs(value)
    assert found.exponent == grid_exponent(torch.tensor([value]))
    assert bits(abs(value), found.exponent) <= 3


def test_integers_and_flags_may_be_factors() -> None:
    """A mask of a user's model is a tensor without a dtype that rounds."""
    value = torch.tensor([[1.0, -3.0]]).double().requires_grad_()
    with Certifier(Precision(53, 53, 53), "test") as certifier:
        bound = certifier.bound(value * torch.tensor([2, -5]) * torch.tensor([True, False]))
    assert bound.terms.tolist() == [[2.0, 0.0]]
    assert constant(torch.zeros(2, dtype=torch.int64)).exponent == grid_exponent(torch.zeros(2))
