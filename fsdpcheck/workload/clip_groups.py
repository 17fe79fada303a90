"""Clipping groups of a case: which parameters share a clip factor, by which bound, and the instrument of each group.

A case clips all parameters of a sample together (one group), or those of each sharding unit and those of the root for
themselves: per-layer clipping (McMahan et al. 2018, arXiv:1812.06210). A group's name is the dotted prefix of its
parameters, "" for the root's, which is the last group. Bounds differ, so that groups cannot be swapped unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from fsdpcheck.case import TrainingCase

T = TypeVar("T", Tensor, nn.Parameter)
INSTRUMENT = "instrument.weight"
"""Canonical name of the instrument of the root's group; that of unit i is "units.i.instrument.weight"."""


def names(case: TrainingCase) -> tuple[str, ...]:
    """Prefixes of the groups, in order."""
    inner = len(case.model.units) if case.step.clip_groups == "units" else 0
    return (*(f"units.{unit}" for unit in range(inner)), "")


def instruments(case: TrainingCase) -> tuple[str, ...]:
    """The instruments' parameters, one a group."""
    return tuple(f"{prefix}.{INSTRUMENT}" if prefix else INSTRUMENT for prefix in names(case))


def is_instrument(parameter: str) -> bool:
    """Whether a parameter, by canonical name, is an instrument's."""
    return parameter == INSTRUMENT or parameter.endswith(f".{INSTRUMENT}")


def number(case: TrainingCase, parameter: str) -> int:
    """The group of a parameter, by canonical name."""
    known = names(case)
    place, unit, *_ = parameter.split(".")
    return int(unit) if place == "units" and len(known) > 1 else len(known) - 1


def multiples(case: TrainingCase) -> tuple[int, ...]:
    """C_l / C of each group: 1, 2, 1, 2, ..."""
    return tuple(1 + group % 2 for group in range(len(names(case))))


def bounds(case: TrainingCase, clip_norm: float) -> dict[str, float]:
    """C_l by prefix, for C = ``clip_norm``."""
    return {prefix: clip_norm * multiple for prefix, multiple in zip(names(case), multiples(case), strict=True)}


def column(values: Tensor, group: int) -> Tensor:
    """[n]: what belongs to one group, of [n] (one group) or [n, G]."""
    return values if values.dim() == 1 else values[:, group]


def members(case: TrainingCase, values: Mapping[str, T], group: int) -> dict[str, T]:
    """What belongs to the parameters of one group, by canonical name."""
    return {name: value for name, value in values.items() if number(case, name) == group}
