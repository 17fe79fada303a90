"""How the gradient of a sample is bounded: flat (global), per layer, or automatic clipping.

A rule maps squared norms to factors: [b] to [b], or with G groups [G, b] to [G, b]; a sample's gradient with respect to
the parameters of group l is multiplied by factor [l, i]. ``sensitivity`` bounds the norm of one sample's clipped
gradient over all parameters, which is what the noise has to hide.

| rule      | factor                              | sensitivity       | source                                        |
|-----------|-------------------------------------|-------------------|-----------------------------------------------|
| Flat      | min(1, C / (n + eps))               | C                 | Abadi et al. 2016, arXiv:1607.00133           |
| PerLayer  | min(1, C_l / (n_l + eps)), by group | sqrt(sum_l C_l^2) | McMahan et al. 2018, arXiv:1812.06210         |
| Automatic | C / (n + gamma)                     | C                 | Bu et al. 2022 (AUTO-S), arXiv:2206.07136     |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import clip_factors


class Clipping(Protocol):
    """A rule of clipping; see the table."""

    @property
    def groups(self) -> tuple[str, ...] | None:
        """Names of the clipping groups, or None where one factor holds for all parameters."""

    @property
    def sensitivity(self) -> float: ...

    def group_of(self, parameter: str) -> int:
        """The number of the group of a parameter, by its canonical name."""

    def factors(self, squared_norms: Tensor) -> Tensor:
        """[b], or [G, b] with groups: factors in the dtype of the squared norms, of the same shape."""


class _OneGroup:
    groups: tuple[str, ...] | None = None

    def group_of(self, parameter: str) -> int:
        return 0


@dataclass(frozen=True)
class Flat(_OneGroup):
    """One factor a sample: min(1, C / (n + eps)), n the norm over all trainable parameters."""

    clip_norm: float

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def factors(self, squared_norms: Tensor) -> Tensor:
        return clip_factors.factors(squared_norms, self.clip_norm)


@dataclass(frozen=True)
class Automatic(_OneGroup):
    """One factor a sample: C / (n + gamma), so that all samples weigh about as much; gamma > 0 keeps small ones small.

    With gamma = 0 (AUTO-V) each gradient is normalised; one of norm zero stays zero.
    """

    clip_norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)
        if not self.gamma >= 0:
            raise ValueError(
                f"got gamma {self.gamma}, wanted a number that is not negative: factors are C / (n + gamma)"
            )

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def factors(self, squared_norms: Tensor) -> Tensor:
        norms = clip_factors.norms(squared_norms) + self.gamma
        bound = torch.full_like(norms, self.clip_norm)
        return torch.where(norms > 0, bound / torch.where(norms > 0, norms, bound), torch.zeros_like(norms))


@dataclass(frozen=True)
class PerLayer:
    """A bound for each group of parameters: ``bounds`` maps a dotted prefix of canonical names to C_l.

    A parameter belongs to the longest prefix that its name has; "" takes the rest. Needs the mode "bookkeeping": one
    backward through re-weighted losses can give a sample one weight only.
    """

    bounds: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ValueError("got no bounds for per-layer clipping, wanted {prefix: C_l, ...}")
        for prefix, bound in self.bounds.items():
            _positive(f"the clip norm of {prefix or 'the rest'}", bound)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.bounds)

    @property
    def sensitivity(self) -> float:
        return math.hypot(*self.bounds.values())

    def group_of(self, parameter: str) -> int:
        fits = [p for p in self.bounds if not p or parameter == p or parameter.startswith(f"{p}.")]
        if not fits:
            raise ValueError(
                f"parameter {parameter} is in no clipping group, groups are {', '.join(self.bounds)};"
                ' add its layer, or "" for all the rest'
            )
        return self.groups.index(max(fits, key=len))

    def factors(self, squared_norms: Tensor) -> Tensor:
        rows = zip(squared_norms.unbind(0), self.bounds.values(), strict=True)
        return torch.stack([clip_factors.factors(row, bound) for row, bound in rows])


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"got {value} as {what}, wanted a positive finite number")
