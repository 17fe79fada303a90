"""Errors of norm^2: direct and Gram, in float32 and bfloat16, on independent and on cancelling tokens.

``python -m benchmarks accuracy``. "plain" is the expression of ``norms.linear`` in the dtype of the data; "kernels" are
those of ``kernels``, which accumulate in float32: Triton's on a GPU or with TRITON_INTERPRET=1, else the twin in torch.
The truth is the float64 gradient of the same rounded data. An error is |got - true| / true; "below" is the share of
samples whose norm comes out too small by more than 1 %: those would be clipped too little, and below zero or zero not
at all.

Cancelling tokens: the second half of the tokens repeats the first with backprops of opposite sign, changed by 1 part in
100 or 1000, so that the terms of the sum over t are kappa times larger than the sum. The error of a direct sum grows
with kappa, that of a Gram sum with kappa^2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fsdpcheck.impl import kernels
from fsdpcheck.impl.norms import linear

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain direct": linear.direct,
    "plain Gram": linear.gram,
    "kernels direct": kernels.direct_squared_norm,
    "kernels half-Gram": kernels.half_gram_squared_norm,
}


def report(samples: int = 8, length: int = 256, width: int = 256) -> str:
    """The table, a line for each kind of data, dtype and form."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.ones(1, 1, 1, device=device)
    used = kernels.implementation(one, one).__name__.rpartition(".")[2]
    lines = [f"{samples} samples, T = {length}, d = p = {width}, on {device}, kernels by {used}; errors of norm^2"]
    lines.append(
        f"{'data':<20}{'dtype':<10}{'kappa':>8}  {'form':<18}{'median error':>14}{'worst error':>14}{'below':>8}"
    )
    for kind, draw in DATA.items():
        for dtype in (torch.float32, torch.bfloat16):
            a_BTd, g_BTp = (x.to(device, dtype) for x in draw(samples, length, width))
            true_B = kernels.bmm_squared_norm(a_BTd.double(), g_BTp.double())
            kappa = _condition(a_BTd, g_BTp, true_B)
            for name, form in FORMS.items():
                relative_B = form(a_BTd, g_BTp).double() / true_B - 1
                error_B, below = relative_B.abs(), (relative_B < -0.01).double().mean().item()
                lines.append(
                    f"{kind:<20}{str(dtype).removeprefix('torch.'):<10}{kappa:>8.1f}  {name:<18}"
                    f"{error_B.median().item():>14.1e}{error_B.max().item():>14.1e}{100 * below:>7.0f}%"
                )
    return "\n".join(lines)


def independent(samples: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Activations and backprops [samples, length, width], all Gaussian; the same every time."""
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(samples, length, width, generator=generator) for _ in range(2))
    return a, g


def cancelling(samples: int, length: int, width: int, part: float) -> tuple[Tensor, Tensor]:
    """The same of half the length, followed by its negative changed by a ``part`` of its size."""
    a, g = independent(samples, length // 2, width)
    change = torch.randn(g.shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([a, a], 1), torch.cat([g, part * change - g], 1)


DATA: dict[str, Callable[[int, int, int], tuple[Tensor, Tensor]]] = {
    "independent": independent,
    "cancelling, 1/100": partial(cancelling, part=1e-2),
    "cancelling, 1/1000": partial(cancelling, part=1e-3),
}


def _condition(a_BTd: Tensor, g_BTp: Tensor, true_B: Tensor) -> float:
    """Norm of the terms, sqrt(sum_t |a_t|^2 |g_t|^2), over the norm of their sum: the median over samples."""
    terms_B = (a_BTd.double().square().sum(2) * g_BTp.double().square().sum(2)).sum(1)
    return (terms_B / true_B).sqrt().median().item()
