"""How ranks stood when a law broke, from the traces of a run: who never came, and never at the price of a finding."""

from __future__ import annotations

from fsdpcheck.execution import Execution, Failure, RankResult, RankState, RunRequest
from fsdpcheck.execution.deadlock import Blocked, Finished, explain
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.ranks import RANKS, RankStood
from fsdpcheck.judging import standings
from tests.common.sessions import CASE


def _call(number: int, op: str = "all_reduce") -> Collective:
    return Collective(op, (0, 1, 2), "world", number, where="train.py:7")


def _execution(traces: list[tuple[Collective, ...]], failure: Failure | None) -> Execution:
    ranks = [RankResult(rank, trace=trace) for rank, trace in enumerate(traces)]
    return Execution("simulated", RunRequest(CASE, "mine"), ranks, failure)


def test_a_blocked_rank_says_in_what_and_for_whom() -> None:
    """Rank 2 waits for the first call, which it issued before another and did not wait for then."""
    first, second = _call(0), _call(1, "barrier")
    traces = [(first,), (), (first, second)]
    states = {0: Blocked(0, first, "train.py:7"), 1: Finished(1), 2: Blocked(2, first, "train.py:9")}
    found = standings.ranks(_execution(traces, explain(states, dict(enumerate(traces)))))
    assert [(one.rank, one.state, one.waits_for, one.where) for one in found] == [
        (0, "blocked", (1,), "train.py:7"),
        (1, "finished", (), ""),
        (2, "blocked", (1,), "train.py:9"),
    ]
    assert found[0].blocked_in == found[2].blocked_in == found[2].calls[0].key != found[2].calls[1].key
    assert found[2].calls[1].op == "barrier"


def test_of_wrong_values_every_rank_finished() -> None:
    found = standings.ranks(_execution([(_call(0),)] * 3, None))
    assert {(one.state, len(one.calls), one.blocked_in) for one in found} == {("finished", 1, "")}
    assert len({one.calls[0].key for one in found}) == 1
    assert len(standings.ranks(_execution([()] * 40, None))) == RANKS


def test_what_cannot_be_told_is_left_away() -> None:
    assert standings.ranks(None) == ()
    assert standings.ranks(_execution([(None,)], None)) == ()  # type: ignore[list-item]
    failure = Failure("raised", "rank 0 raised", (RankState(0, "raised", where="train.py:3"),))
    assert standings.ranks(_execution([()], failure)) == (RankStood(0, "raised", where="train.py:3"),)
