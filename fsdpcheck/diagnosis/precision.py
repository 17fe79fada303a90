"""Suspicions about precision: gradients of some units that pass through a type with fewer bits.

Legend: W ranks, N the normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fsdpcheck.diagnosis import shards, weights
from fsdpcheck.diagnosis.fitting import chunks, rows
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.suspects import Suspect

_TYPES = {3: "float8_e5m2", 4: "float8_e4m3", 8: "bfloat16", 11: "float16", 24: "float32"}
"""Bits of a significand, the hidden one included -> the type that has them."""

Explains = Callable[[Named], bool]


def rounded(answer: Answer, step: int, explains: Explains) -> Iterator[Suspect]:
    """Suspicions that the gradient of each unit is the right one, or the right one with fewer bits.

    ``explains``: whether gradients (float64) of some parameters are those got.
    """
    case, released = answer.case, answer.steps[step].released
    right = {name: value.double() for name, value in released.items()}
    wrong = {unit: names for unit, names in shards.units(case, list(right)).items()
             if not explains({name: right[name] for name in names})}  # fmt: skip
    for words, parts, scale in _stages(answer, step) if wrong else ():
        for bits, kind in _TYPES.items():
            if all(explains(_sum(parts, names, bits, scale)) for names in wrong.values()):
                text = f"gradients of {', '.join(wrong)} are rounded to {bits} bits, the precision of {kind}, {words}"
                yield Suspect(f"rounded to {bits} bits {words}", text)


def _stages(answer: Answer, step: int) -> Iterator[tuple[str, Sequence[Named], float]]:
    """(when, what is rounded then and added up, what it is divided by after that)."""
    case, wanted = answer.case, answer.steps[step]
    yield "when they are reduced", [{name: value.double() for name, value in wanted.released.items()}], 1.0
    everyone = chunks(case, step, wanted)
    if case.layout.kind == "replicated":
        return
    if case.step.micro_batches > 1:
        together = [[row for mine in everyone for row in mine[number]] for number in range(case.step.micro_batches)]
        yield "when they are reduced", [_of(answer, step, own, 1.0) for own in together], 1.0
    if case.world_size > 1:
        world = float(case.world_size)
        yield "before they are reduced", [_of(answer, step, own, world) for own in rows(case, step, wanted)], world


def _of(answer: Answer, step: int, own: list[int], scale: float) -> Named:
    """Released gradient of these rows alone, times ``scale``."""
    share = weights.of_rows(answer, step, own) * scale
    return {name: torch.tensordot(share, g, dims=1) for name, g in answer.steps[step].gradients.items()}


def _sum(parts: Sequence[Named], names: Sequence[str], bits: int, scale: float) -> Named:
    return {name: torch.stack([_with_bits(part[name], bits) for part in parts]).sum(0) / scale for name in names}


def _with_bits(value: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)
