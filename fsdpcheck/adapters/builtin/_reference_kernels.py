"""The norm kernels of the reference implementation, by form, by implementation and by tile."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fsdpcheck.adapters.capabilities import Kernel


def kernels() -> dict[str, Kernel]:
    """The package's own choices, the twins in torch, and Triton's with tiles so small that there are several.

    Asked for only where Triton is installed: see ``reference.Reference``.
    """
    from fsdpcheck.impl import kernels as package
    from fsdpcheck.impl.kernels import torch_norms

    return {
        "chosen": lambda a, g: package.squared_norm(a, g),
        "direct": lambda a, g: package.direct_squared_norm(a, g),
        "half_gram": lambda a, g: package.half_gram_squared_norm(a, g),
        "bmm": lambda a, g: package.bmm_squared_norm(a, g),
        "direct in torch": lambda a, g: torch_norms.direct_squared_norm(a, g),
        "half_gram in torch": lambda a, g: torch_norms.half_gram_squared_norm(a, g),
        "direct, tiles 16 x 32": partial(_small, "direct_squared_norm", 32),
        "half_gram, tiles 16 x 16": partial(_small, "half_gram_squared_norm", 16),
    }


def _small(form: str, columns: int, activations: Tensor, backprops: Tensor) -> Tensor:
    from fsdpcheck.impl import kernels as package
    from fsdpcheck.impl.kernels import triton_norms

    if torch.float64 in (activations.dtype, backprops.dtype):  # which Triton kernels are not made for
        found: Tensor = getattr(package, form)(activations, backprops)
        return found
    tiled: Tensor = getattr(triton_norms, form)(activations, backprops, triton_norms.Tiles(16, columns, 16))
    return tiled
