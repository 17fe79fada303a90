"""Cases of norm kernels: shapes, dtypes, memory layouts and numbers of the two tensors a kernel is given. See
``fsdpcheck.case``.

Legend: B samples, T positions, d input and p output features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fsdpcheck.case import fields, serialization
from fsdpcheck.case.training import FILLER
from fsdpcheck.case.vocabulary import Trait

KernelDtype = Literal["float32", "float64", "bfloat16", "float16"]
MemoryLayout = Literal["contiguous", "turned", "spread", "shared"]
KernelNumbers = Literal["grid", "real"]
Spoil = Literal["none", "nan", "inf"]
_MAX_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Activations [B, T, d] and backprops [B, T, p] of a Linear: ``samples``, ``positions``, ``inputs``, ``outputs``.

    ``memory``, of both: "contiguous"; "turned", the last two dimensions exchanged in memory; "spread", with gaps
    between neighbours; "shared", one position of memory for all T (stride 0).
    ``numbers``: "grid" draws integers in +-``bound``, times 2^``exponents``; "real" fractions of 20 bits, where every
    second position almost cancels the one before it. ``spoil``: what one element of one sample is replaced by.
    ``repeated``: everything is computed thrice, the last time with the programs of each launch in the opposite order.
    """

    samples: int = 1
    positions: int = 1
    inputs: int = 1
    outputs: int = 1
    activations: KernelDtype = "float32"
    backprops: KernelDtype = "float32"
    memory: tuple[MemoryLayout, MemoryLayout] = ("contiguous", "contiguous")
    numbers: KernelNumbers = "grid"
    bound: int = 1
    exponents: tuple[int, int] = (0, 0)
    spoil: Spoil = "none"
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One process calls a kernel, without ranks, and trains nothing."""

    kernel: KernelSpec
    seed: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises InvalidCase when the case contradicts itself; every case that exists has passed."""
        fields.require_words([("kernel", self.kernel)])
        fields.require_ranges([fields.of_seed(self.seed), *_ranges(self.kernel)])

    def requires(self) -> frozenset[Trait]:
        """What the case demands of an implementation: nothing that a trait says."""
        return frozenset()

    def describe(self) -> str:
        """The case in words: shapes, numbers; a line each."""
        return _described(self)

    def to_json(self) -> str:
        """One line of JSON with every field and the version; ``case.from_json`` gives an equal case back."""
        return serialization.encode(dataclasses.replace(FILLER, seed=self.seed), kernel=dataclasses.asdict(self.kernel))

    @property
    def world_size(self) -> int:
        return 1


def _ranges(spec: KernelSpec) -> Iterator[fields.Range]:
    for name in ("samples", "positions", "inputs", "outputs"):
        yield f"kernel.{name}", getattr(spec, name), 0, 4096
    yield "kernel.bound", spec.bound, 1, 1 << 10
    for place, exponent in enumerate(spec.exponents):
        yield f"kernel.exponents[{place}]", exponent, -24, 12
    size = spec.samples * spec.positions * max(spec.inputs, spec.outputs)
    yield "the size of the kernel's tensors", size, 0, _MAX_ELEMENTS
    if spec.spoil != "none":
        yield "elements of a kernel case that is spoiled", size * min(spec.inputs, spec.outputs), 1, _MAX_ELEMENTS**2


def _described(case: KernelCase) -> str:
    spec = case.kernel
    shapes = f"activations [{spec.samples}, {spec.positions}, {spec.inputs}] {spec.activations} {spec.memory[0]}"
    shapes += f", backprops [{spec.samples}, {spec.positions}, {spec.outputs}] {spec.backprops} {spec.memory[1]}"
    numbers = "fractions of 20 bits that almost cancel"
    if spec.numbers == "grid":
        numbers = f"integers in +-{spec.bound} times 2^{spec.exponents[0]} and 2^{spec.exponents[1]}"
    spoilt = "" if spec.spoil == "none" else f", one element {spec.spoil}"
    return f"kernel: {shapes}\nnumbers: {numbers}{spoilt}; seed {case.seed}"
