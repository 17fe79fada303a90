"""What a simulated rank costs: by rank and call as worlds grow, against torchrun on one script, on a large model."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdpcheck import simulate

WORLDS: Final = (2, 8, 32, 64)
CALLS: Final = 200
_FORK: Final = multiprocessing.get_context("fork")

SCRIPT: Final = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.full((8, 32), dist.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"sum {sum(value.sum().item() for value in model.parameters()):.6f}")
dist.destroy_process_group()
"""


def _calls(many: int) -> None:
    dist.init_process_group("gloo")
    tensor = torch.ones(8)
    for _ in range(many):
        dist.all_reduce(tensor)


def _large() -> int:
    """A step of 100 layers and 100 million parameters, sharded layer by layer; how many parameters there were."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(100)])
    count = sum(parameter.numel() for parameter in model.parameters())
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    return count


def costs(program: Callable[[], Any], world_size: int) -> tuple[float, float, Any]:
    """Seconds of processor time, megabytes that the process grew by at most, what rank 0 returned; in a fork."""
    here, there = _FORK.Pipe(duplex=False)

    def run(there: Connection) -> None:
        gc.freeze()  # a whole collection goes through all of torch, 90 ms at some call or other
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        done = simulate(program, world_size, show=False).check()
        spent = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        there.send((spent, grown, done.returned[0]))

    child = _FORK.Process(target=run, args=(there,))
    child.start()
    found: tuple[float, float, Any] = here.recv()
    child.join()
    return found


def worlds() -> Iterator[str]:
    """Processor time by rank and call, and memory by rank, as worlds grow."""
    for size in WORLDS:
        few, grown, _ = min(costs(partial(_calls, CALLS), size) for _ in range(3))
        many, _, _ = min(costs(partial(_calls, 2 * CALLS), size) for _ in range(3))
        each = (many - few) / size / CALLS  # what is done once, by the first calls, is in both
        yield f"W = {size:2}: {each * 1e6:6.1f} us of processor time a rank and call, {grown / size:5.2f} MB a rank"


def against_torchrun() -> Iterator[str]:
    """Wall and processor time of one script, from the command to its end, both ways; they must print the same."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for size in (2, 4):
            ours = [sys.executable, "-m", "fsdpcheck", "simulate", "-n", str(size), str(script)]
            theirs = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={size}",
                str(script),
            ]
            rows = [(_timed(ours), _timed(theirs)) for _ in range(2)]
            sums = {row.said for pair in rows for row in pair}
            assert len(sums) == 1, sums
            (wall, cpu), (real_wall, real_cpu) = (
                (min(row[side].wall for row in rows), min(row[side].processor for row in rows)) for side in (0, 1)
            )
            yield (
                f"W = {size}: {wall:.1f} s and {cpu:.1f} s of processor time, torchrun {real_wall:.1f} s and "
                f"{real_cpu:.1f} s: {real_wall / wall:.1f} and {real_cpu / cpu:.1f} times as much"
            )


class _timed:
    """A command that was run: seconds of the clock and of processors, and the sum that it printed.

    Processes over gloo sometimes end by "terminate called without an active exception" when all is computed and printed
    (torch 2.13); that is no reason to lose the measurement, and a sum that is missing is.
    """

    def __init__(self, command: list[str]) -> None:
        before, began = os.times(), time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = os.times()
        self.wall = time.monotonic() - began
        self.processor = after.children_user + after.children_system - before.children_user - before.children_system
        sums = [line.rpartition("sum ")[2] for line in done.stdout.splitlines() if "sum " in line]
        if len(sums) != 1:
            raise RuntimeError(f"{command} printed {len(sums)} sums, wanted 1: {done.stderr[-2000:]}")
        self.said = sums[0]


def lines() -> Iterator[str]:
    """All of it."""
    yield from worlds()
    yield from against_torchrun()
    spent, grown, count = costs(_large, 8)
    yield f"{count / 1e6:.0f} million parameters in 100 layers, W = 8: {spent:.1f} s of processor time, {grown:.0f} MB"
