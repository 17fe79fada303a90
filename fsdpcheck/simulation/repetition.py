"""The first order once more: whether it comes to the same end, and whatever buffers of calls under way hold.

A read of such a buffer that no operator of torch makes, through a NumPy array over its memory say, is seen by nothing
that watches. But a rank that makes one goes on with the poison (simulation/in_flight.py). So the first order is run
again with another poison: if that ends otherwise, and the usual one as before, a buffer was read too early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.comparison import compared
from fsdpcheck.simulation.decisions import Decisions
from fsdpcheck.simulation.simulate import Simulation

Once = Callable[[Decisions], Simulation]
OTHERWISE: Final = "the program went another way in the same order of ranks: it is not deterministic"


def repeated(once: Once, first: Simulation, begun: Sequence[str]) -> tuple[tuple[str, ...], Simulation | None]:
    """A void if the first order, run once more, is another run; ``first``, failed, if it reads what is in flight.

    ``begun``: what was decided in it."""

    def is_another(refilled: Collection[str]) -> bool:
        decisions = Decisions(begun, refilled=refilled)
        again = compared(first, once(decisions))
        same = again.failure is None and again.traces == first.traces
        return not same or [step.chosen for step in decisions.taken] != list(begun)

    flights: dict[str, dict[int, Collective]] = {}
    for rank, trace in enumerate(first.traces):
        for call in trace:
            if call.asynchronous:
                flights.setdefault(call.where, {})[rank] = call
    if not is_another(flights):
        return (), None
    if not flights or is_another(()):
        return (OTHERWISE,), None
    read = [where for where in flights if is_another((where,))]
    return (), replace(first, failure=_read_in_flight([*chain(*(flights[where].items() for where in read or flights))]))


def _read_in_flight(calls: Sequence[tuple[int, Collective]]) -> Failure:
    text = "in-flight: what ranks do depends on what a buffer of a call holds before it was waited for"
    for rank, call in calls:
        text += f"\n  call    rank {rank}: {call}\n  issued  at {call.where or 'an unknown place'}"
    text += "\n  next    wait for the work before its buffers are read, in whatever way"
    return Failure("in-flight", text, tuple(RankState(rank, "running", "", call.where) for rank, call in calls))
