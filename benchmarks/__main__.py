"""Print every ratio as one table: ``python -m benchmarks [rendezvous|engines]``."""

from __future__ import annotations

import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(chosen: list[str]) -> None:
    """Run the chosen groups of ratios (all when none is named), one line each as it is measured."""
    import torch

    from benchmarks import engines

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    groups = {"rendezvous": engines.rendezvous_ratios, "engines": engines.engine_ratios}
    for name in chosen or groups:
        for ratio in groups[name]():
            print(ratio, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
