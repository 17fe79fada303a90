"""The two tensors of a kernel case, the exact answer, and memory that shows who reads or writes outside of it.

Legend: B samples, T positions, d input and p output features.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from fsdpcheck.case import prng
from fsdpcheck.case.kernel import KernelDtype, KernelSpec, MemoryLayout

DTYPES: dict[KernelDtype, torch.dtype] = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16
}  # fmt: skip
GRID = 26
"""Every number of a case is a multiple of 2^-GRID, once its power of two is divided out, below 2^27 of them."""
MARGIN = 64
"""Elements of guarded memory on either side of a tensor."""
_BITS = 20


def tensors(spec: KernelSpec, seed: int) -> tuple[Tensor, Tensor]:
    """(activations [B, T, d], backprops [B, T, p]) in their dtypes, without anything spoiled; plain memory."""
    activations, backprops = _numbers(spec, seed, 0, spec.inputs), _numbers(spec, seed, 1, spec.outputs)
    if spec.numbers == "real":
        pairs = spec.positions // 2
        activations[:, 1 : 2 * pairs : 2] = activations[:, 0 : 2 * pairs : 2]
        backprops[:, 1 : 2 * pairs : 2] = backprops[:, 1 : 2 * pairs : 2] / 64 - backprops[:, 0 : 2 * pairs : 2]
    activations, backprops = (
        value[:, :1].expand_as(value) if memory == "shared" else value
        for value, memory in zip((activations, backprops), spec.memory, strict=True)
    )
    return activations.to(DTYPES[spec.activations]), backprops.to(DTYPES[spec.backprops])


def spoiled(spec: KernelSpec, seed: int) -> tuple[int, int, int, int] | None:
    """(which of the two tensors, sample, position, feature) of the element that is replaced, if one is."""
    if spec.spoil == "none":
        return None
    which = int(prng.integers(seed, "spoiled tensor", (1,), 0, 1)[0])
    features = (spec.inputs, spec.outputs)[which]
    extents = (spec.samples, spec.positions, features)
    sample, position, feature = (
        int(prng.integers(seed, f"spoiled {n}", (1,), 0, size - 1)[0]) for n, size in enumerate(extents)
    )
    return which, sample, position, feature


def exact(spec: KernelSpec, seed: int) -> tuple[list[Fraction], list[Fraction]]:
    """By sample: ||sum_t g_t a_t^T||_F^2, and the same of absolute values, which bounds every sum that forms it."""
    found: list[list[Fraction]] = []
    a_BTd, g_BTp = (_integers(value, e) for value, e in zip(tensors(spec, seed), spec.exponents, strict=True))
    unit = Fraction(2) ** (2 * sum(spec.exponents) - 4 * GRID)
    for a, g in ((a_BTd, g_BTp), (a_BTd.abs(), g_BTp.abs())):
        gradients = g.transpose(1, 2) @ a
        found.append([sum(x * x for x in own.flatten().tolist()) * unit for own in gradients])
    return found[0], found[1]


def by_position(spec: KernelSpec, seed: int) -> list[Fraction]:
    """By sample: sum_t ||g_t a_t^T||_F^2, which lacks the products of two positions."""
    a_BTd, g_BTp = (_integers(value, e) for value, e in zip(tensors(spec, seed), spec.exponents, strict=True))
    unit = Fraction(2) ** (2 * sum(spec.exponents) - 4 * GRID)
    found = []
    for a_Td, g_Tp in zip(a_BTd.tolist(), g_BTp.tolist(), strict=True):
        terms = (sum(x * x for x in a) * sum(x * x for x in g) for a, g in zip(a_Td, g_Tp, strict=True))
        found.append(sum(terms) * unit)
    return found


def roundings(spec: KernelSpec) -> int:
    """How many roundings a term of the norm passes at most, in the direct form and in the Gram form, in any order.

    Direct: T + 1 for an element of the gradient, twice, since it is squared, then the square and d p additions. Gram:
    d + 1 and p + 1 for the elements of the two matrices, then the product and T^2 additions. Both: one to return.
    """
    T, d, p = spec.positions, spec.inputs, spec.outputs
    return max(2 * (T + 1) + d * p, d + p + 2 + T * T) + 2


class Guarded:
    """A copy of a tensor inside memory of its own that is NaN wherever the tensor is not."""

    def __init__(self, value: Tensor, memory: MemoryLayout) -> None:
        B, T, features = value.shape
        shapes = {"contiguous": (B, T, features), "turned": (B, features, T), "shared": (B, min(T, 1), features),
                  "spread": (B, T + 1, 2 * features)}  # fmt: skip
        shape = shapes[memory]
        size = torch.Size(shape).numel()
        self._memory = torch.full((size + 2 * MARGIN,), float("nan"), dtype=value.dtype)
        room = self._memory[MARGIN : MARGIN + size].view(shape)
        views = {"contiguous": room, "turned": room.transpose(1, 2), "shared": room, "spread": room[:, :T, ::2]}
        view = views[memory]
        view.copy_(value[:, :1] if memory == "shared" else value)
        self.tensor = view.expand(B, T, features) if memory == "shared" else view
        self._before = self._memory.clone()

    def spoil(self, place: tuple[int, int, int], number: float) -> None:
        """Replace one element."""
        self.tensor[place[0], place[1] if self.tensor.stride(1) else 0, place[2]] = number
        self._before = self._memory.clone()

    @property
    def changed(self) -> bool:
        """Whether any bit of the memory is another than before."""
        return self._memory.view(torch.uint8).ne(self._before.view(torch.uint8)).any().item() is True


def _numbers(spec: KernelSpec, seed: int, which: int, features: int) -> Tensor:
    """[B, T, features] float64."""
    shape, stream = (spec.samples, spec.positions, features), ("activations", "backprops")[which]
    if spec.numbers == "real":
        return torch.from_numpy(prng.fractions(seed, stream, shape, _BITS))
    return torch.from_numpy(prng.symmetric(seed, stream, shape, spec.bound)).double() * 2.0 ** spec.exponents[which]


def _integers(value: Tensor, exponent: int) -> Tensor:
    """int64: ``value`` in units of 2^(exponent - GRID), exactly."""
    scaled = value.double() * 2.0 ** (GRID - exponent)
    return scaled.to(torch.int64)
