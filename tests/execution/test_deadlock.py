"""Wait-for analysis on hand-written states and traces: which hang is it, who is missing, and when it is none."""

from __future__ import annotations

import dataclasses

import pytest

from fsdpcheck.execution.deadlock import (
    Blocked,
    Exited,
    Finished,
    Lost,
    Raised,
    Running,
    State,
    analyse,
    explain,
    nobody_can_move,
)
from fsdpcheck.execution.matching import differing, ranks_text
from fsdpcheck.execution.trace import Collective, Trace

PAIR = (0, 1)
REDUCE = Collective("all_reduce", PAIR, "world", 0, "sum", inputs=(("float64", (4,)),), outputs=(("float64", (4,)),))


def call(
    op: str = "all_reduce", group: tuple[int, ...] = PAIR, sequence: int = 0, name: str = "", **more: object
) -> Collective:
    return dataclasses.replace(REDUCE, op=op, group=group, group_name=name or str(group), sequence=sequence, **more)  # type: ignore[arg-type]


def message(op: str, tag: int = 0) -> Collective:
    """One side of a message from rank 0 to rank 1."""
    tensors = {"inputs": REDUCE.inputs, "outputs": ()} if op == "send" else {"inputs": ()}
    return call(op, reduce_op="", tag=tag, name="0", **tensors)


def by_rank(*states: State) -> dict[int, State]:
    return {state.rank: state for state in states}


def test_a_call_the_other_rank_never_makes_is_a_deadlock() -> None:
    states = by_rank(Blocked(0, call(sequence=3), "train.py:12", ("frame",)), Finished(1))
    assert nobody_can_move(states)
    failure = explain(states, {1: (call(sequence=0),)}, seconds=0.5)
    assert (failure.kind, failure.seconds) == ("deadlock", 0.5)
    assert "waiting for rank 1, at train.py:12" in failure.text
    assert "was never called by rank 1 (1 call on this group; finished)" in failure.text
    assert failure.ranks[0].waiting_for == str(call(sequence=3))
    assert failure.ranks[0].stack == ("frame",)
    assert failure.ranks[1].state == "finished"


def test_a_call_in_a_function_of_many_is_told_with_who_called_it() -> None:
    asked = [call(sequence=2, where="shards.py:68", called_at=f"units.py:{line}") for line in (60, 60, 82)]
    waiting = [Blocked(rank, one, "shards.py:68") for rank, one in enumerate(asked)]
    told = explain(by_rank(*waiting[:1], Finished(1)))
    assert "waiting for rank 1, at shards.py:68, called at units.py:60\n" in told.text
    group = {rank: dataclasses.replace(one, group=(0, 1, 2, 3)) for rank, one in enumerate(asked)}
    found = analyse({**{rank: (one,) for rank, one in group.items()}, 3: ()})
    assert found is not None
    by_line = "ranks 0, 1 did at shards.py:68, called at units.py:60, rank 2 did at shards.py:68, called at units.py:82"
    assert by_line in found.text


def test_a_running_rank_may_still_come() -> None:
    assert not nobody_can_move(by_rank(Blocked(0, call()), Running(1)))


def test_all_members_present_and_agreeing_can_move() -> None:
    assert not nobody_can_move(by_rank(Blocked(0, call()), Blocked(1, call())))


def test_all_finished_is_not_a_hang() -> None:
    assert not nobody_can_move(by_rank(Finished(0), Finished(1)))


def test_a_call_in_flight_counts_as_present() -> None:
    """Rank 1 issued the call without waiting and is blocked elsewhere; rank 0 will be served."""
    later = call(group=(1, 2))
    states = by_rank(Blocked(0, call()), Blocked(1, later), Finished(2))
    assert not nobody_can_move(states, {1: (call(asynchronous=True),)})
    assert nobody_can_move(states, {1: ()})


def test_a_receive_from_any_source_is_never_part_of_a_proof() -> None:
    anyone = message("recv_anysource")
    assert not nobody_can_move(by_rank(Blocked(0, anyone), Finished(1)))
    sent = by_rank(Blocked(0, message("send")), Finished(1))
    assert nobody_can_move(sent)
    assert not nobody_can_move(sent, {1: (anyone,)}), "it may be the one that was received"


def test_the_two_sides_of_a_message_meet_and_agree_in_dtype_and_number_of_elements() -> None:
    both = message("send"), message("recv")
    assert not nobody_can_move(by_rank(Blocked(0, both[0]), Blocked(1, both[1])))
    assert analyse({0: both[:1], 1: both[1:]}) is None
    assert nobody_can_move(by_rank(Blocked(0, both[0]), Blocked(1, message("recv", tag=8))))
    assert differing(both[0], dataclasses.replace(both[1], outputs=(("float64", (2, 2)),))) == ()
    assert differing(both[0], dataclasses.replace(both[1], outputs=(("int8", (3,)),))) == (
        "dtype",
        "number of elements",
    )


def test_ranks_that_wait_for_a_store_key_nobody_sets_are_a_deadlock() -> None:
    waits = [Blocked(rank, Collective("store.get", PAIR, "store key 'x'", 0)) for rank in PAIR]
    assert nobody_can_move(by_rank(*waits))
    failure = explain(by_rank(*waits))
    assert failure.kind == "deadlock"
    assert "waiting for another rank to act" in failure.text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"op": "reduce_scatter", "root": 1}, "op"),
        ({"reduce_op": "max"}, "reduce op"),
        ({"root": 1}, "root"),
        ({"inputs": (("float64", (5,)),)}, "input shape"),
        ({"inputs": (("float32", (4,)),)}, "input dtype"),
        ({"outputs": (("float64", (5,)),)}, "output shape"),
        ({"subject": "units.1"}, "subject"),
    ],
)
def test_a_mismatch_names_the_field_and_shows_both_sides(change: dict[str, object], field: str) -> None:
    one = call(subject="units.0")
    other = dataclasses.replace(one, **change)  # type: ignore[arg-type]
    assert differing(one, other) == (field,)
    states = by_rank(Blocked(0, one), Blocked(1, other))
    assert nobody_can_move(states)
    failure = explain(states)
    assert failure.kind == "mismatch"
    assert f"differs between its members in {field}\n" in failure.text
    assert f"rank 0: {one}" in failure.text
    assert f"rank 1: {other}" in failure.text


def test_an_unknown_subject_and_asynchrony_may_differ() -> None:
    assert differing(call(subject="units.0"), call(asynchronous=True)) == ()


def test_a_gather_has_outputs_on_its_root_only() -> None:
    assert differing(call("gather", root=0), call("gather", root=0, outputs=())) == ()


def test_three_ranks_in_a_mismatch_are_one_finding_with_equal_sides_folded() -> None:
    group = (0, 1, 2)
    states = by_rank(*(Blocked(r, call(group=group, reduce_op="max" if r == 1 else "sum")) for r in group))
    failure = explain(states)
    assert "ranks 0, 2: all_reduce" in failure.text
    assert failure.text.count("mismatch") == 1


def test_opposite_orders_on_two_groups_are_a_ring() -> None:
    group = (0, 1, 2)
    states = by_rank(
        Blocked(0, call(group=(0, 1))), Blocked(1, call(group=(1, 2))), Blocked(2, call(group=(0, 2), name="x"))
    )
    assert nobody_can_move(states)
    failure = explain(states)
    assert failure.kind == "deadlock"
    assert "ring: rank 0 waits for rank 1 waits for rank 2 waits for rank 0" in failure.text
    assert [state.rank for state in failure.ranks] == list(group)


def test_a_hang_that_buffering_would_avoid_is_unsafe() -> None:
    """Rank 0 sends a broadcast that rank 1 takes only after the reduction: rank 0 may leave early and come to it."""
    broadcast, reduction = call("broadcast", name="a", root=0), call(name="b")
    assert explain(by_rank(Blocked(0, broadcast), Blocked(1, reduction))).kind == "unsafe"
    receiver = dataclasses.replace(broadcast, root=1)
    assert explain(by_rank(Blocked(0, receiver), Blocked(1, reduction))).kind == "deadlock"


@pytest.mark.parametrize(
    ("ended", "kind", "words"),
    [
        (Raised(1, "Traceback ...\nValueError: 7", "ValueError"), "raised", "rank 1 raised ValueError"),
        (Exited(1, 3), "exited", "rank 1 left with exit code 3"),
        (Lost(1, "SIGSEGV"), "lost", "rank 1 was lost: killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ended_is_the_failure_and_its_peers_only_wait(ended: State, kind: str, words: str) -> None:
    states = by_rank(Blocked(0, call()), ended)
    assert nobody_can_move(states)
    failure = explain(states, seconds=1.0)
    assert failure.kind == kind
    assert failure.text.startswith(words)
    assert "rank 0: in all_reduce" in failure.text
    assert failure.seconds is None


def test_the_same_exception_on_all_ranks_is_told_once() -> None:
    failure = explain(by_rank(*(Raised(rank, f"ValueError: {rank}", "ValueError") for rank in range(4))))
    assert failure.text.startswith("ranks 0-3 raised ValueError")
    assert failure.text.count("ValueError: ") == 1
    assert failure.exception == "ValueError"


def test_a_mismatch_comes_before_what_it_led_to() -> None:
    traces = {0: (call(),), 1: (call(reduce_op="max"),)}
    assert explain(by_rank(Lost(0, "SIGABRT"), Lost(1, "SIGABRT")), traces).kind == "mismatch"


def both(*calls: Collective) -> dict[int, Trace]:
    return {0: calls, 1: calls}


def test_equal_traces_are_fine() -> None:
    assert analyse(both(call(), call("all_gather", sequence=1), call(name="other"))) is None


def test_a_completed_run_with_a_silent_mismatch_is_found() -> None:
    failure = analyse({0: (call(),), 1: (call(reduce_op="max"),)})
    assert failure is not None
    assert failure.kind == "mismatch"
    assert "reduce op" in failure.text


def test_a_completed_run_with_an_unmatched_call_is_unsafe() -> None:
    failure = analyse({0: (call(), call("broadcast", sequence=1, root=0)), 1: (call(),)})
    assert failure is not None
    assert failure.kind == "unsafe"
    assert "was never called by rank 1 (1 call on this group)" in failure.text


def test_orders_that_differ_across_groups_are_unsafe_unless_asynchronous() -> None:
    one, other = call(name="a"), call(name="b")
    failure = analyse({0: (one, other), 1: (other, one)})
    assert failure is not None
    assert failure.kind == "unsafe"
    assert "(group 'a')" in failure.text, "groups of the same ranks are told apart"
    loose = tuple(dataclasses.replace(collective, asynchronous=True) for collective in (one, other))
    assert analyse({0: loose, 1: loose[::-1]}) is None


def test_a_message_is_no_call_of_a_group_of_the_same_two_ranks() -> None:
    assert analyse({0: (message("send"), call()), 1: (call(asynchronous=True), message("recv"))}) is None


def test_messages_and_collectives_in_other_orders_are_a_ring() -> None:
    failure = analyse({0: (message("send"), call(name="0")), 1: (call(name="0"), message("recv"))})
    assert failure is not None
    assert (failure.kind, "comes before" in failure.text) == ("unsafe", True)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 2, 3, 4], "ranks 0, 2-4"), ([5, 1], "ranks 1, 5")],
)
def test_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
