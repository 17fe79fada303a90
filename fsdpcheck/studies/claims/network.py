"""The constants of every model in the ledger: rows that speak of time count, and multiply by these.

An all-reduce of n bytes over W ranks by a tree: 2 ceil(log2 W) alpha + 2 n beta (Hockney 1994; Thakur et al. 2005).
"""

from __future__ import annotations

import math

ALPHA_SECONDS = 4e-6
"""Latency of one hop."""
BETA_SECONDS = 1 / 25e9
"""A byte, at 200 Gbit/s."""
GPU_FLOPS = 4e14
"""Operations a second that a large matrix product reaches in bfloat16 on an H100, 40 % of its peak."""
LAUNCH_SECONDS = 5e-6
"""Host time to launch a kernel."""


def all_reduce_seconds(numbers_bytes: float, world_size: int) -> float:
    """Seconds of one all-reduce of so many bytes, by the model."""
    return 2 * math.ceil(math.log2(world_size)) * ALPHA_SECONDS + 2 * numbers_bytes * BETA_SECONDS
