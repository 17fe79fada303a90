"""How fine the grids of the surrogates are: one set of them is in place at a time, in the whole process.

Every bit of a value or a slope costs many in the squares of gradients, and more the deeper a model is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from fsdpcheck.exact.surrogates.grid_rounding import SHIFT, constant_to_grid, to_grid


@dataclass(frozen=True, slots=True)
class Grid:
    """The multiples of 2**-bits within [low, high]. ``shift``: what of a step a value is raised by before the floor."""

    bits: int
    low: float
    high: float
    shift: float = SHIFT

    def round(self, values: Tensor) -> Tensor:
        """Float64 ``values`` on the grid; counts those too near a decision, see ``grid_rounding.to_grid``."""
        return to_grid(values, self.bits, self.low, self.high, self.shift)

    def round_constants(self, values: Tensor) -> Tensor:
        """The same of values that nobody computes again, and of which none is in doubt."""
        return constant_to_grid(values, self.bits, self.low, self.high, self.shift)

    @property
    def largest(self) -> float:
        """The greatest magnitude on it."""
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True, slots=True)
class Grids:
    """``normal``: normalised inputs. ``hands_on``: the backward of a normalisation is the cotangent times the weight,
    linear all the same. ``activation``, ``slope``: GELU and SiLU, and what their backwards multiply by. ``tanh``,
    ``sigmoid``: their backwards are torch's own, which multiply by 1 - y**2 and y (1 - y), dyadic where y is.
    ``softmax``: its probabilities, whose sum need not be 1, and ``loss``: those by which the backward of log-softmax
    multiplies. ``log``: log-softmax. ``scales``: attention multiplies scores by a power of two near the true scale.
    ``turn``: cosines and sines. ``share``: quotients by a total.
    """

    normal: Grid
    hands_on: bool
    activation: Grid
    slope: Grid
    tanh: Grid
    sigmoid: Grid
    softmax: Grid
    loss: Grid
    log: Grid
    scales: bool
    turn: Grid
    share: Grid


FINE: Final = Grids(
    normal=Grid(1, -2.0, 2.0),
    hands_on=False,
    activation=Grid(1, -8.0, 8.0),
    slope=Grid(1, -0.5, 1.5),
    tanh=Grid(2, -1.0, 1.0),  # on halves tanh(1) is 1 already, and nearly no gradient passes
    sigmoid=Grid(2, 0.0, 1.0),
    softmax=Grid(2, 0.0, 1.0),
    loss=Grid(2, 0.0, 1.0),
    log=Grid(1, -16.0, 0.0),
    scales=True,
    turn=Grid(1, -1.0, 1.0),  # rotations that keep no lengths, but turn by every quarter
    share=Grid(2, -2.0, 2.0),
)
"""Of cases whose layers are drawn."""
COARSE: Final = replace(FINE, hands_on=True)
"""Of a user's model, which may be deep."""
WHOLE: Final = Grids(
    normal=Grid(0, -1.0, 1.0),
    hands_on=True,
    activation=Grid(0, -2.0, 2.0),
    slope=Grid(0, 0.0, 1.0),
    tanh=Grid(0, -1.0, 1.0),
    sigmoid=Grid(1, 0.0, 1.0),
    softmax=Grid(0, 0.0, 1.0, shift=0.725),  # 1 above 0.275: a row has several, for one alone hands on no gradient
    loss=Grid(0, 0.0, 1.0),
    log=Grid(0, -4.0, 0.0),
    scales=False,
    turn=Grid(0, -1.0, 1.0),
    share=Grid(0, -2.0, 2.0),
)
"""Of a user's model that computes in low precision: whole numbers, of which few bits hold many."""


@dataclass
class _Placed:
    grids: Grids = FINE


_placed = _Placed()


def now() -> Grids:
    """Those in place."""
    return _placed.grids


def place(grids: Grids) -> None:
    """Have them in place from now on; ``surrogates.installed`` calls it."""
    _placed.grids = grids
