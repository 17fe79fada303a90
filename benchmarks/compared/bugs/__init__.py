"""All planted bugs, by area."""

from __future__ import annotations

from typing import Final

from benchmarks.compared.bugs import averaged_by_hand, data_parallel, sharded, small_errors, tensor_parallel
from benchmarks.compared.planted import Bug

BUGS: Final[tuple[Bug, ...]] = (
    *data_parallel.BUGS,
    *averaged_by_hand.BUGS,
    *sharded.BUGS,
    *tensor_parallel.BUGS,
    *small_errors.BUGS,
)
