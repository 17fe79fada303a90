"""What is proved exact is exact: each operator beside the same in rational numbers, of more and more bits."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdpcheck.comparison.precision import proofs
from fsdpcheck.comparison.precision.multiples import Multiple, is_short, multiple
from fsdpcheck.comparison.precision.operators import operator

aten = torch.ops.aten
Rational = Any
"""An array of Fractions."""


def rational(tensor: Tensor) -> Rational:
    return np.vectorize(Fraction, otypes=[object])(tensor.double().numpy())


def drawn(generator: torch.Generator, bits: int, *shape: int) -> Tensor:
    """Multiples of a power of two, of so many bits."""
    whole = torch.randint(-(2**bits), 2**bits + 1, shape, generator=generator)
    return whole.double() * 2.0 ** int(torch.randint(-30, 30, (), generator=generator))


CASES: dict[str, tuple[Any, list[tuple[int, ...]], list[Any], Callable[..., Rational]]] = {
    "add": (aten.add.Tensor, [(5,), (5,)], [], lambda a, b: a + b),
    "sub": (aten.sub.Tensor, [(5,), (5,)], [], lambda a, b: a - b),
    "mul": (aten.mul.Tensor, [(5,), (5,)], [], lambda a, b: a * b),
    "mul by a number": (aten.mul.Tensor, [(5,)], [0.75], lambda a: a * Fraction(3, 4)),
    "div by a number": (aten.div.Tensor, [(5,)], [8.0], lambda a: a / 8),
    "div by three": (aten.div.Tensor, [(5,)], [3.0], lambda a: a / 3),
    "addcmul": (aten.addcmul.default, [(5,), (5,), (5,)], [], lambda a, b, c: a + b * c),
    "square": (aten.pow.Tensor_Scalar, [(5,)], [2], lambda a: a * a),
    "sum": (aten.sum.dim_IntList, [(4, 8)], [[1]], lambda a: a.sum(1)),
    "cumsum": (aten.cumsum.default, [(4, 8)], [1], lambda a: a.cumsum(1)),
    "mean": (aten.mean.dim, [(4, 8)], [[1]], lambda a: a.sum(1) / 8),
    "mean of three": (aten.mean.dim, [(4, 3)], [[1]], lambda a: a.sum(1) / 3),
    "mm": (aten.mm.default, [(3, 6), (6, 2)], [], lambda a, b: a.dot(b)),
    "addmm": (aten.addmm.default, [(3, 2), (3, 6), (6, 2)], [], lambda a, b, c: a + b.dot(c)),
    "mse": (aten.mse_loss.default, [(8,), (8,)], [1], lambda a, b: ((a - b) ** 2).sum() / 8),
    "mse backward": (
        aten.mse_loss_backward.default, [(1,), (8,), (8,)], [1], lambda g, a, b: g * (a - b) / 4,
    ),
    "leaky": (aten.leaky_relu.default, [(5,)], [0.25], lambda a: np.where(a > 0, a, a / 4)),
    "leaky backward": (
        aten.leaky_relu_backward.default, [(5,), (5,)], [0.25, False], lambda g, a: np.where(a > 0, g, g / 4),
    ),
    "sqrt": (aten.sqrt.default, [(5,)], [], lambda a: a * 0 + Fraction(1, 3)),
    "index_add": (
        aten.index_add.default, [(2, 3), (5, 3)], [], lambda a, b: a + np.stack([b[:3].sum(0), b[3:].sum(0)]),
    ),
    "foreach": (aten._foreach_add.Scalar, [(5,)], [0.5], lambda a: a + Fraction(1, 2)),
}  # fmt: skip
NEVER = {"div by three", "mean of three", "sqrt"}


@pytest.mark.parametrize("name", CASES)
def test_what_is_proved_equals_rational_arithmetic(name: str) -> None:
    func, shapes, more, wanted = CASES[name]
    generator = torch.Generator().manual_seed(3)
    proved = {bits: 0 for bits in (2, 53)}
    for bits in [*range(1, 54)] * 4:
        tensors = [drawn(generator, bits, *shape) for shape in shapes]
        args = [*tensors, *more]
        if name == "index_add":
            args = [tensors[0], 0, torch.tensor([0, 0, 0, 1, 1]), tensors[1]]
        if name == "foreach":
            args = [tensors, *more]
        if proofs.is_exact(operator(func), args, {}):
            got = func(*args)
            got = got[0] if isinstance(got, list) else got
            assert np.array_equal(rational(got), wanted(*map(rational, tensors))), (bits, tensors)
            proved[53 if bits > 40 else 2] += 1
    assert (proved[2] == 0) == (name in NEVER)


def test_a_wrong_proof_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "fit", lambda terms: True)
    with pytest.raises(AssertionError):
        test_what_is_proved_equals_rational_arithmetic("mm")


def test_convolutions_are_proved_by_the_sums_of_their_products() -> None:
    image, kernel = torch.arange(50.0).double().reshape(1, 2, 5, 5), torch.arange(-9.0, 9).double().reshape(1, 2, 3, 3)
    rest = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    known = operator(aten.convolution.default)
    assert proofs.is_exact(known, [image, kernel, *rest], {})
    assert proofs.is_exact(known, [image * 2.0**40, kernel, *rest], {})
    assert not proofs.is_exact(known, [image + 2.0**-44, kernel, *rest], {})


def test_ranks_add_what_has_few_bits_together() -> None:
    one, small = [torch.ones(3, dtype=torch.float64)], [torch.full((3,), 2.0**-60, dtype=torch.float64)]
    assert proofs.adds_exactly([one, one, one], average=False)
    assert not proofs.adds_exactly([one, one, one], average=True)
    assert proofs.adds_exactly([one, one], average=True)
    assert not proofs.adds_exactly([one, small], average=False)


def test_numbers_that_python_may_have_rounded_prove_nothing() -> None:
    x = torch.ones(1, dtype=torch.float64)
    known = operator(aten.mul.Tensor)
    assert proofs.is_exact(known, [x, 0.375], {})
    assert not proofs.is_exact(known, [x, 0.1], {})
    assert not proofs.is_exact(known, [x, float("nan")], {})
    assert not proofs.is_exact(known, [x.float(), x], {})
    assert is_short(torch.tensor([0.375, 2.0**-300, -4095.0, 0.0]))
    assert not is_short(torch.tensor([0.1]))
    assert multiple(torch.tensor([0.375, -4.0, 0.0], dtype=torch.float64)) == Multiple(4.0, -3)


def test_unknown_operators_complex_numbers_and_large_integers_prove_nothing() -> None:
    x = torch.ones(2, dtype=torch.float64)
    assert not proofs.is_exact(operator(aten.exp.default), [x], {})
    assert not proofs.is_exact(operator(aten.add.Tensor), [x.to(torch.complex128), x], {})
    large = torch.tensor([2**53 + 1])
    cast = operator(aten._to_copy.default)
    assert not proofs.is_exact(cast, [large], {"dtype": torch.float64})
    assert proofs.is_exact(cast, [large - 2], {"dtype": torch.float64})
    assert proofs.is_exact(cast, [large], {"dtype": torch.int32})
