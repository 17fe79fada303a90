"""Random streams at a fixed place: what a user's code draws where it is imported or called is the same each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def fixed_seeds(seed: int = 0) -> Iterator[None]:
    """The random streams of torch (CPU), numpy and Python at ``seed``, and back where they were on leaving."""
    kept, numpy_kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(numpy_kept)
