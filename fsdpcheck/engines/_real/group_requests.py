"""Groups that real ranks make: gloo holds whoever makes one until each member has made the group of that name.

Torch names groups by how many a rank has made. So ranks that make others meet, in groups that are not one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.deadlock import Blocked, State
from fsdpcheck.execution.matching import MAKING
from fsdpcheck.execution.trace import Collective, Trace


def left_out(trace: Sequence[Collective]) -> Trace:
    """The calls on groups, without the making of groups: simulated ranks have the same."""
    return tuple(call for call in trace if call.op != MAKING)


def disagreement(states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]]) -> Failure | None:
    """What is wrong where a rank waits in a group of which another has made one of that name with other members.

    None where no two disagree. Whether gloo lets such a rank go on is not said; that they disagree is.
    """
    made: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, trace in traces.items():
        for call in trace:
            if call.op == MAKING:
                made.setdefault((call.group_name, call.sequence), {})[rank] = call
    for rank, state in states.items():
        if isinstance(state, Blocked) and state.collective.op == MAKING:
            own = state.collective
            for other, call in made[own.group_name, own.sequence].items():
                if call.group != own.group:
                    return _disagree(own.group_name.removeprefix(f"{MAKING} "), {rank: own, other: call})
    return None


def _disagree(name: str, sides: Mapping[int, Collective]) -> Failure:
    lines = [f"  rank {rank}: {MAKING}({list(call.group)}), at {call.where}" for rank, call in sorted(sides.items())]
    head = f"mismatch: ranks disagree about group {name!r}: all of them must make the same groups in the same order"
    places = tuple(RankState(rank, "making a group", "", call.where) for rank, call in sorted(sides.items()))
    return Failure("mismatch", "\n".join([head, *lines]), places)
