"""What is said of streams that meet without an order, and of memory that is given away while it is in use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fsdpcheck.execution import Failure, FailureKind, RankState
from fsdpcheck.execution.call_sites import line_text
from fsdpcheck.simulation.device.history import Access, Line
from fsdpcheck.simulation.device.timelines import Timeline
from fsdpcheck.simulation.scheduler import place

if TYPE_CHECKING:
    from fsdpcheck.simulation.device.allocator import Block, Freed


def race(rank: int, shape: tuple[int, ...], new: Access, old: Access) -> Failure:
    """Two operations that nothing orders, one of which writes."""
    did = f"{'writes' if new.writes else 'reads'} what another {'writes' if old.writes else 'reads'}"
    text = (
        f"stream race: on rank {rank} an operation {did}, and nothing orders the two; tensor of shape {list(shape)}\n"
        f"  got     {_told(new)}\n  and     {_told(old)}\n"
        f"  wanted  the first to come after the second\n  next    {_remedy(new, old)}"
    )
    return _failure("stream race", text, rank, new.line, old.line)


def freed_in_use(rank: int, freed: Freed, use: Access, owner: Timeline, block: Block) -> Failure:
    """Memory that was freed while another stream used it, and that an allocation may now be given."""
    text = (
        f"freed in use: on rank {rank} an allocation may be given memory that another stream still uses\n"
        f"  got     an allocation of {block.bytes} bytes on {owner.name}, at {_at(block.allocated)}\n"
        f"  of      memory allocated there at {_at(freed.allocated)}, and freed at {_at(freed.line)}\n"
        f"  in use  by {_told(use)}\n"
        f"  wanted  {owner.name} to come after that use before it is given the memory\n"
        f"  next    call record_stream on the tensor for {use.timeline.name}; or have {owner.name} wait for it before "
        f"the tensor is freed"
    )
    return _failure("freed in use", text, rank, block.allocated, use.line)


def _failure(kind: FailureKind, text: str, rank: int, line: Line, other: Line) -> Failure:
    """With the lines of the program, and the place inside torch's own sharding where one stands there."""
    where, stack = place(sys._getframe(3))
    here = line_text(line) or where
    inside = f"\n  inside  {where}" if where not in ("", here) else ""
    states = RankState(rank, "running", "", here, stack), RankState(rank, "earlier", "", line_text(other))
    return Failure(kind, text + inside, states)


def _told(access: Access) -> str:
    return f"{access.operation} on {access.timeline.name}, at {_at(access.line)}"


def _at(line: Line) -> str:
    return line_text(line) or "an unknown place"


def _remedy(new: Access, old: Access) -> str:
    if new.timeline.name == "the host":
        return "synchronize an event recorded after the copy, or its stream, before the host goes on; or let it block"
    if old.timeline.name == "the host":
        return "let the host do this before it issues the other"
    return f"have {new.timeline.name} wait: wait_stream, or wait_event of an event recorded after the second"
