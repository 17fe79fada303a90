"""torch's LocalTensorMode on a pair: one program for all ranks, in which a tensor holds one of each rank.

The program is not changed: ``dist.get_rank`` gives it an integer that differs by rank, as torch's own tests of the mode
have it, and its group is torch's fake one, as there. Programs that branch on the rank, or need its number, are not
made for it: what torch then says is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalIntNode, LocalTensorMode

from benchmarks.communication import real
from benchmarks.communication.pairs import Pair
from benchmarks.communication.real import Outcome
from fsdpcheck.engines._real.forks import Say


def run(pair: Pair, faulty: bool, seconds: float) -> Outcome:
    """Run the program once, for all ranks."""
    heard = real.collected({(0,): lambda say: _program(pair, faulty, say)}, seconds)
    return Outcome(heard.kind, heard.text.replace("rank 0: ", "all ranks: ", 1), heard.seconds)


def _program(pair: Pair, faulty: bool, say: Say) -> None:
    init = dist.init_process_group

    def joined(*_: Any, **__: Any) -> None:
        init("fake", rank=0, world_size=pair.world_size)

    def in_one() -> object:
        with LocalTensorMode(pair.world_size):
            return pair.run(faulty)

    dist.init_process_group = joined
    dist.get_rank = _rank
    torch.autograd._enable_record_function(False)
    real.tell(0, in_one, say)


def _rank(group: dist.ProcessGroup | None = None) -> torch.SymInt:
    """The number of each rank in the group, -1 in one that it is not in."""
    members = dist.get_process_group_ranks(group)
    everyone = range(dist.get_world_size())
    return torch.SymInt(LocalIntNode({rank: members.index(rank) if rank in members else -1 for rank in everyone}))
