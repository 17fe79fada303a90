"""How the ranks stood in the run that broke a law, and what they had called, for a finding."""

from __future__ import annotations

from fsdpcheck.execution import Execution, RankResult, RankState
from fsdpcheck.execution.matching import Sides, absent, instance, match
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.ranks import RANKS, Call, RankStood


def ranks(execution: Execution | None) -> tuple[RankStood, ...]:
    """Those of the newest run, RANKS at most; () where there was none, or where it cannot be told.

    A picture of a finding is never worth the finding.
    """
    if execution is None:
        return ()
    try:
        return _told(execution)
    except Exception:
        return ()


def _told(execution: Execution) -> tuple[RankStood, ...]:
    states = {state.rank: state for state in execution.failure.ranks} if execution.failure is not None else {}
    sides = match({result.rank: result.trace for result in execution.ranks})
    return tuple(_rank(result, states.get(result.rank), sides).bounded() for result in execution.ranks[:RANKS])


def _rank(result: RankResult, state: RankState | None, sides: Sides) -> RankStood:
    calls = tuple(map(_call, result.trace))
    if state is None:
        return RankStood(result.rank, "finished", calls=calls)
    stuck = next((call for call in reversed(result.trace) if str(call) == state.waiting_for), None)
    if stuck is None or state.state != "blocked":
        return RankStood(result.rank, state.state, where=state.where, calls=calls)
    missing = tuple(sorted(absent(instance(stuck), sides)))
    return RankStood(result.rank, state.state, _key(stuck), missing, state.where, calls)


def _call(call: Collective) -> Call:
    return Call(_key(call), call.op, str(call), call.group, call.where)


def _key(call: Collective) -> str:
    own = instance(call)
    return f"{own.group_name} {list(own.members)} #{own.sequence}" + ("" if own.tag is None else f" tag {own.tag}")
