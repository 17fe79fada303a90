"""The Triton kernels against explicit gradients, bit for bit: interpreted if TRITON_INTERPRET=1, else on a GPU.

Run by ``test_kernels``, or by hand: ``TRITON_INTERPRET=1 python -m pytest tests/impl/kernels/kernels_on_a_device.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fsdpcheck.impl import kernels
from fsdpcheck.impl.kernels import triton_norms
from fsdpcheck.impl.kernels.triton_norms import Tiles
from tests.common.tables import every_pair

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = Tiles(16, 16, 16)
OBLONG = Tiles(16, 32, 16)
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "direct": kernels.direct_squared_norm,
    "half-Gram": kernels.half_gram_squared_norm,
    "direct, small tiles": lambda a, g: triton_norms.direct_squared_norm(a, g, SMALL),
    "direct, oblong tiles": lambda a, g: triton_norms.direct_squared_norm(a, g, OBLONG),
    "half-Gram, small tiles": lambda a, g: triton_norms.half_gram_squared_norm(a, g, SMALL),
}
SHAPES = [
    (0, 3, 4, 5),
    (2, 0, 3, 4),
    (2, 3, 0, 4),
    (1, 1, 1, 1),
    (3, 1, 6, 2),
    (2, 16, 16, 32),
    (2, 17, 1, 33),
    (1, 50, 33, 1),
    (2, 65, 20, 17),
]


def integers(B: int, T: int, d: int, p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations and backprops whose products and sums are exact in float32."""
    generator = torch.Generator().manual_seed(B + T + d + p)
    a_BTd, g_BTp = (torch.randint(-3, 4, (B, T, f), generator=generator).to(DEVICE, dtype) for f in (d, p))
    return a_BTd, g_BTp


def explicit(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B] float32, exact: from the gradients themselves."""
    return (g_BTp.double().transpose(1, 2) @ a_BTd.double()).square().sum((1, 2)).float()


def test_the_mode_is_what_was_asked_for() -> None:
    a_BTd, g_BTp = integers(1, 1, 1, 1, torch.float32)
    assert triton_norms.INTERPRETED == INTERPRETED
    assert kernels.implementation(a_BTd, g_BTp) is triton_norms


@every_pair({"name": FORMS, "shape": SHAPES, "dtype": [torch.float32, torch.bfloat16, torch.float16]})
def test_exact_data_give_the_bits_of_the_explicit_form(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    a_BTd, g_BTp = integers(*shape, dtype)
    got = FORMS[name](a_BTd, g_BTp)
    assert got.dtype == torch.float32
    assert torch.equal(got, explicit(a_BTd, g_BTp)), dtype


@pytest.mark.parametrize("name", FORMS)
def test_strides_and_mixed_precision(name: str) -> None:
    a_BTd, g_BTp = integers(2, 20, 18, 17, torch.float32)
    turned = a_BTd.transpose(1, 2).contiguous().transpose(1, 2)
    every_other = g_BTp.repeat_interleave(2, 2)[..., ::2]
    assert not turned.is_contiguous()
    assert every_other.stride(2) == 2
    assert torch.equal(FORMS[name](turned.bfloat16(), every_other), explicit(a_BTd, g_BTp))


@pytest.mark.parametrize("name", FORMS)
def test_a_sample_has_the_same_bits_alone_and_in_any_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a_BTd, g_BTp = (torch.randn(3, 20, f, generator=generator).to(DEVICE) for f in (18, 17))
    together = FORMS[name](a_BTd, g_BTp)
    alone = torch.cat([FORMS[name](a_BTd[i : i + 1], g_BTp[i : i + 1]) for i in range(3)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", FORMS)
def test_a_sample_with_nan_has_norm_nan_and_others_are_untouched(name: str) -> None:
    a_BTd, g_BTp = integers(3, 5, 4, 6, torch.float32)
    wanted = explicit(a_BTd, g_BTp)
    a_BTd[1, 2, 0] = float("nan")
    got = FORMS[name](a_BTd, g_BTp)
    assert got.isnan().tolist() == [False, True, False]
    assert torch.equal(got[[0, 2]], wanted[[0, 2]])


def test_a_gram_sum_below_zero_becomes_zero() -> None:
    """Partials that add up to -1, as rounding can leave them."""
    assert triton_norms._added(torch.tensor([[1.0, -2.0], [1.0, 2.0]], device=DEVICE)).tolist() == [0.0, 3.0]


def test_partials_are_added_in_float64() -> None:
    """1000 times 2^-24 beside 1: each is lost in float32."""
    partials = torch.full((1, 1001), 2.0**-24, device=DEVICE)
    partials[0, 0] = 1.0
    assert triton_norms._added(partials).tolist() == [torch.tensor(1 + 1000 * 2.0**-24).item()]


@pytest.mark.parametrize(("T", "d", "p"), [(4096, 4096, 4096), (2048, 4096, 4096), (1024, 8192, 8192)])
def test_workspace_is_at_most_a_thousandth_of_the_gradients(T: int, d: int, p: int) -> None:
    for tiles, bytes_an_element in ((triton_norms.HALF_TILES, 2), (triton_norms.FULL_TILES, 4)):
        for partials in (triton_norms.direct_partials(d, p, tiles), triton_norms.half_gram_partials(T, tiles)):
            assert 4 * partials <= 1e-3 * bytes_an_element * d * p


@triton.jit
def _squared_too_early(
    a_ptr, g_ptr, partials_ptr, T, d, p, tiles, steps, a_B, a_T, a_d, g_B, g_T, g_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The split-K bug: each half of T is squared by itself."""
    tile, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    across, half = tl.cdiv(d, COLUMNS), T // 2
    row, column = tile // across * ROWS, tile % across * COLUMNS
    a_ptr += b * a_B
    g_ptr += b * g_B
    early = triton_norms._contract(
        g_ptr, a_ptr, p, d, half, steps, row, column, g_p, g_T, a_T, a_d, ROWS, COLUMNS, DEPTH, WIDEN
    )
    late = triton_norms._contract(
        g_ptr + half * g_T, a_ptr + half * a_T, p, d, T - half, steps, row, column, g_p, g_T, a_T, a_d,
        ROWS, COLUMNS, DEPTH, WIDEN,
    )  # fmt: skip
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.sum(early * early + late * late, 1), 0))


def test_exact_data_show_a_square_taken_before_the_sum_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    a_BTd, g_BTp = integers(2, 20, 5, 6, torch.float32)
    monkeypatch.setattr(triton_norms, "_direct_partials", _squared_too_early)
    assert not torch.equal(kernels.direct_squared_norm(a_BTd, g_BTp), explicit(a_BTd, g_BTp))
