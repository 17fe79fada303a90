"""``python -m benchmarks [GROUP [ARGUMENT ...]]``: ratios against peers, and studies of agreement and of shares.

Groups: rendezvous, engines, agreement [schedules|processes] [N], shares [N], acceptance [N], steps [N], coverage [N],
shrunk [SEED], deadlocks, diagnosis [SEED [FAULT]], private, accuracy, kernels (on a GPU). Without a group: both groups
of ratios.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(arguments: list[str]) -> None:
    """Run one group, or both groups of ratios, and print a line a measurement."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    group, *rest = arguments or ["ratios"]
    if group == "agreement":
        from benchmarks import agreement

        print(getattr(agreement, rest[0])(int(rest[1])))
    elif group == "deadlocks":
        from benchmarks import deadlocks

        for line in deadlocks.reports():
            print(line, flush=True)
    elif group == "kernels":
        from benchmarks import kernels

        for line in kernels.lines():
            print(line, flush=True)
    elif group == "private":
        from benchmarks import private_step

        for line in private_step.lines():
            print(line, flush=True)
    elif group == "shrunk":
        from benchmarks import coverage

        for line in coverage.shrunk(*map(int, rest)):
            print(line, flush=True)
    elif group == "accuracy":
        from benchmarks import norm_accuracy

        print(norm_accuracy.report())
    elif group == "diagnosis":
        from benchmarks import diagnosis

        for line in diagnosis.reports(int(rest[0]) if rest else 0, *rest[1:]):
            print(line, flush=True)
    elif group in ("shares", "acceptance", "steps", "coverage"):
        print(importlib.import_module(f"benchmarks.{group}").report(*map(int, rest)))
    else:
        from benchmarks import engines

        groups = {"rendezvous": engines.rendezvous_ratios, "engines": engines.engine_ratios}
        for measure in [groups[group]] if group in groups else groups.values():
            for ratio in measure():
                print(ratio, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
