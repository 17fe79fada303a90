"""Numbers with fewer bits are named by what has them and when: gradients, parameters, norms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdpcheck import diagnosis
from fsdpcheck.case import Arithmetic
from fsdpcheck.diagnosis import bits, contributions, norm_kernels
from fsdpcheck.diagnosis.cause_fit import rows
from fsdpcheck.findings.cause import named
from fsdpcheck.oracle import Named
from tests.common.fabricated import PLAIN, SMALL, clipped
from tests.common.later import later

NARROW = later(clipped("unclipped", replace(SMALL, arithmetic=Arithmetic("float32"))))


@pytest.mark.parametrize(("count", "dtype"), [(8, torch.bfloat16), (11, torch.float16), (24, torch.float32)])
def test_rounding_to_bits_is_that_of_the_types_that_have_them(count: int, dtype: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = values[values.abs() > 2.0**-10]  # a half has few bits below its smallest normal number
    assert torch.equal(bits.rounded(values, count), values.to(dtype).double())


def test_parameters_that_were_rounded_are_told_from_parameters_that_are_near() -> None:
    after = PLAIN.steps[0].after
    kept = {name: bits.rounded(value / 3, 8) for name, value in after.items()}
    answer = replace(PLAIN, steps=[replace(PLAIN.steps[0], after={n: v / 3 for n, v in after.items()})])
    assert "rounded to 8 bits, the precision of bfloat16, when updated" in named(diagnosis.of_update(answer, 0, kept))
    near = {name: value * (1 + 2.0**-9) for name, value in kept.items()}
    assert "rounded" not in named(diagnosis.of_update(answer, 0, near))


def _reduced(count: int, order: tuple[int, ...]) -> Named:
    """The gradient of three ranks that are added up in ``order``, each term and each sum in few bits."""
    step, found = PLAIN.steps[0], {}
    for name, value in step.gradients.items():
        local = [
            torch.tensordot(contributions.of_rows(PLAIN, 0, own) * 3, value, dims=1) for own in rows(SMALL, 0, step)
        ]
        local = [bits.rounded(own, count) for own in local]
        total = local[order[0]]
        for rank in order[1:]:
            total = bits.rounded(total + local[rank], count)
        found[name] = bits.rounded(total / 3, count)
    return found


def test_sums_over_ranks_in_few_bits_are_named_where_rounding_their_result_would_differ() -> None:
    once = {name: bits.rounded(value.double(), 3) for name, value in PLAIN.steps[0].released.items()}
    got = _reduced(3, (0, 1, 2))
    assert any(not torch.equal(value, once[name]) for name, value in got.items())
    words = "rounded to 3 bits, the precision of float8_e5m2, when they are reduced"
    assert words in named(diagnosis.of_gradient(PLAIN, 0, got))
    assert "rounded" not in named(diagnosis.of_gradient(PLAIN, 0, {n: v * 1.25 for n, v in got.items()}))


@pytest.mark.parametrize(("count", "types"), [(8, "bfloat16"), (11, "float16 and TF32")])
def test_squared_norms_of_fewer_bits_are_named_also_beyond_the_largest_half(count: int, types: str) -> None:
    scale = 12297.0  # to beyond 65504, and more bits than are kept
    squares = NARROW.steps[0].squared_norms * scale
    gradients = {name: value * scale**0.5 for name, value in NARROW.steps[0].gradients.items()}
    step = replace(NARROW.steps[0], squared_norms=squares, norms=squares.float().sqrt(), gradients=gradients)
    answer, own = replace(NARROW, steps=[step]), rows(NARROW.case, 0, step)[0]
    said = named(diagnosis.of_norms(answer, 0, 0, bits.rounded(squares, count).float().sqrt()[own]))
    assert f"squared norms are rounded to {count} bits, the precision of {types}" in said
    assert named(diagnosis.of_norms(answer, 0, 0, step.norms[own] * (1 + 2.0**-count))) == ""


def test_a_kernels_norm_of_fewer_bits_is_told_from_a_wrong_one() -> None:
    right = 1.2345678
    said = named([*norm_kernels.of_few_bits(float(torch.tensor(right).bfloat16()), right)])
    assert said.startswith("the norm is rounded to 8 bits")
    assert [*norm_kernels.of_few_bits(right * (1 + 2.0**-9), right)] == []
    assert [*norm_kernels.of_few_bits(1.5, right)] == []  # few bits, but not the nearest
