"""Flight-Recorder dumps of jobs: what is wrong in them, on NCCL's written by hand and on real ones of gloo."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.errors import UsageError
from fsdpcheck.traces import checking, reading
from tests.common.dumps import Entry, dump, entry, message, of_gloo, write

WORLD = {"0": (0, 1)}
TWO = {"0": (0, 1), "a": (0, 1), "b": (0, 1)}
STUCK = {"state": "started", "retired": False}
LATER = {"state": "scheduled", "retired": False}


def found(folder: Path, by_rank: dict[int, list[Entry]], groups: dict[str, Any] = WORLD, **more: Any) -> list[str]:
    """What is wrong with the dumps, or what is noted where nothing is, line by line."""
    write(folder, {rank: dump(entries, groups, **more) for rank, entries in by_rank.items()})
    return told(folder)


def told(folder: Path) -> list[str]:
    job = reading.read([folder])
    failure = checking.finding(job)
    return failure.text.split("\n") if failure is not None else [*checking.under_way(job), *job.notes]


def test_a_job_without_fault_is_one_whatever_its_form(tmp_path: Path) -> None:
    calls = [
        entry("nccl:all_reduce", 1),
        entry("nccl:_all_gather_base", 2, output_sizes=[[8]]),
        entry("nccl:all_gather", 3, output_sizes=[[2, 4]]),
        entry("nccl:_reduce_scatter_base", 4, input_sizes=[[8]]),
        entry("nccl:all_reduce_barrier", 5, input_sizes=[[1]], output_sizes=[[1]]),
    ]
    assert found(tmp_path / "pickles", {0: calls, 1: calls}) == []
    job = reading.read([tmp_path / "pickles"])
    assert [call.op for call in job.traces[0]] == [
        "all_reduce",
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "barrier",
    ]
    assert job.traces[0][1].outputs == job.traces[0][2].outputs == (("float32", (4,)),) * 2, "packed or not"
    write(tmp_path / "json", {rank: dump(calls, WORLD) for rank in range(2)}, as_json=True)
    assert told(tmp_path / "json") == []
    assert reading.read([tmp_path / "json"]).traces == job.traces


def test_calls_that_differ_are_a_mismatch_with_the_lines_of_all_sides(tmp_path: Path) -> None:
    both = [entry("nccl:all_reduce", 1, line=7)]
    head, *sides = found(tmp_path / "shape", {0: both, 1: [entry("nccl:all_reduce", 1, line=9, input_sizes=[[5]])]})
    assert head == "mismatch: call #1 on ranks [0, 1] differs between its members in input shape"
    assert sides == [
        "  rank 0: all_reduce(float32[4]) #1 on ranks [0, 1] at /home/user/train.py:7",
        "  rank 1: all_reduce(float32[5]) #1 on ranks [0, 1] at /home/user/train.py:9",
    ]
    gathered = entry("nccl:_all_gather_base", 1, output_sizes=[[8]])
    head, *_ = found(tmp_path / "output", {0: [gathered], 1: [{**gathered, "output_sizes": [[9]]}]})
    assert head.endswith("in output dtype, output shape"), "one tensor is no two parts"
    for change, field in (
        ({"profiling_name": "nccl:broadcast"}, "op"),
        ({"input_dtypes": ["Double"], "output_dtypes": ["Double"]}, "input dtype, output dtype"),
    ):
        head = found(tmp_path / field, {0: both, 1: [{**both[0], **change}]})[0]
        assert head.endswith(f"differs between its members in {field}")


def test_who_never_came_is_named_with_the_lines_of_those_who_did(tmp_path: Path) -> None:
    first = entry("nccl:all_reduce", 1)
    lines = found(tmp_path, {0: [first, entry("nccl:broadcast", 2, line=7, **STUCK)], 1: [first]})
    call = "broadcast(float32[4]) #2 on ranks [0, 1]"
    assert lines == [
        "unsafe: a call was never matched; a backend that waits for all members hangs",
        f"  missing: {call} was never called by rank 1 (1 call on this group); rank 0 did at /home/user/train.py:7",
        f"  rank 0: in {call}, waiting for rank 1, at /home/user/train.py:7",
        "  rank 1: running",
    ]


def test_ranks_that_stand_in_calls_of_one_another_are_a_deadlock(tmp_path: Path) -> None:
    """The host waited for each call, so that neither issued its second."""
    mine = [entry("nccl:all_reduce", 1), entry("nccl:all_reduce", 1, group="a", line=7, **STUCK)]
    theirs = [entry("nccl:all_reduce", 1), entry("nccl:all_reduce", 1, group="b", line=9, **STUCK)]
    head, *lines = found(tmp_path, {0: mine, 1: theirs}, TWO)
    assert head == "deadlock: no rank can move (W = 2)"
    assert "waiting for rank 1, at /home/user/train.py:7" in lines[0]
    assert "waiting for rank 0, at /home/user/train.py:9" in lines[1]
    assert lines[-1] == "  ring: rank 0 waits for rank 1 waits for rank 0"


@pytest.mark.parametrize("state", [{}, STUCK])
def test_groups_in_different_orders_are_a_ring_though_all_have_come(tmp_path: Path, state: dict[str, Any]) -> None:
    """NCCL's host waits for nothing: both issued both calls, and their devices may run them one after another."""
    a, b = (entry("nccl:all_reduce", 1, group=name, line=line, **state) for name, line in (("a", 7), ("b", 8)))
    head, first, second, *stood = found(tmp_path, {0: [a, b], 1: [b, a]}, TWO)
    assert "are issued in different orders; devices that run one call after another" in head
    assert "(group 'a') at /home/user/train.py:7 comes before" in first
    assert "(group 'b') at /home/user/train.py:8 comes before" in second
    assert len(stood) == (2 if state else 0)
    assert found(tmp_path / "alike", {0: [a, b], 1: [a, b]}, TWO)[:1] != [head]


def test_a_call_that_all_came_to_and_none_got_through_is_noted(tmp_path: Path) -> None:
    (note,) = found(tmp_path, {rank: [entry("nccl:all_reduce", 1, line=7, **STUCK)] for rank in range(2)})
    assert note.startswith("ranks 0, 1 stood in all_reduce(float32[4]) #1 on ranks [0, 1] at /home/user/train.py:7, to")


def test_a_rank_without_a_dump_is_named_and_not_accused(tmp_path: Path) -> None:
    three = {"0": (0, 1, 2)}
    calls = [entry("nccl:all_reduce", 1), entry("nccl:all_reduce", 2, **STUCK)]
    notes = found(tmp_path / "stuck", {0: calls, 2: calls}, three)
    assert [note.split(":")[0] for note in notes][1:] == ["there is no dump of rank 1"]
    lines = found(tmp_path / "missing", {0: calls, 2: calls[:1]}, three)
    assert lines[1].startswith("  missing: all_reduce(float32[4]) #2 on ranks [0, 1, 2] was never called by rank 2 (")
    assert "differs" in found(tmp_path / "other", {0: calls, 2: [entry("nccl:broadcast", 1)]}, three)[0]


def test_a_ring_buffer_that_dropped_its_beginning_is_lined_up_by_numbers(tmp_path: Path) -> None:
    calls = [entry("nccl:all_reduce", number, input_sizes=[[number]]) for number in range(1, 8)]
    write(tmp_path, {0: dump(calls, WORLD), 1: dump(calls[3:], WORLD, first=3)})
    (note,) = told(tmp_path)
    assert note.startswith("the ring buffer of rank 1 begins with record 3: calls are lined up by collective_seq_id")
    write(tmp_path, {1: dump(calls[3:6], WORLD, first=3)})
    assert "#7 on ranks [0, 1] was never called by rank 1" in told(tmp_path)[1], "what comes after is judged"
    write(tmp_path, {1: dump([calls[4], calls[3]], WORLD, first=3)})
    write(tmp_path, {1: dump([{**calls[3], "input_sizes": [[9]]}, *calls[4:]], WORLD, first=3)})
    assert told(tmp_path)[0] == "mismatch: call #4 on ranks [0, 1] differs between its members in input shape"


def test_a_group_that_a_cut_dump_lacks_is_judged_by_what_is_under_way(tmp_path: Path) -> None:
    old, new = entry("nccl:all_reduce", 1, group="a"), entry("nccl:all_reduce", 2, group="a", **STUCK)
    rest = [entry("nccl:all_reduce", number) for number in (5, 6)]
    write(tmp_path, {0: dump([old, *rest], TWO), 1: dump(rest, TWO, first=9)})
    assert len(told(tmp_path)) == 1, "rank 1 may have made the old call before record 9"
    write(tmp_path, {0: dump([old, *rest, new], TWO)})
    assert "#2 on ranks [0, 1] (group 'a') was never called by rank 1" in told(tmp_path)[1]


def test_calls_launched_as_one_are_one(tmp_path: Path) -> None:
    """Only the entry that ends them knows whether they ended; a buffer may begin in the middle of them."""
    parts = [entry("nccl:_all_gather_base", 3, output_sizes=[[8]], state="scheduled", retired=False) for _ in "xy"]
    end = entry("nccl:ALLGATHER_coalesced", 3, input_sizes=[], input_dtypes=[], output_sizes=[], output_dtypes=[])
    fast = entry("nccl:allreduce_coalesced", 4, input_sizes=[[1], [2]], input_dtypes=["Float"] * 2)
    fast |= {"output_sizes": [[1], [2]], "output_dtypes": ["Float"] * 2}
    assert found(tmp_path / "fine", {0: [*parts, end, fast], 1: [*parts, end, fast]}) == []
    job = reading.read([tmp_path / "fine"])
    assert [(call.op, call.sequence, len(call.inputs)) for call in job.traces[0]] == [
        ("all_gather", 3, 2),
        ("all_reduce", 4, 2),
    ]
    assert "differs" in found(tmp_path / "fewer", {0: [*parts, end, fast], 1: [parts[0], end, fast]})[0]
    write(tmp_path / "fine", {1: dump([parts[1], end, fast], WORLD, first=1)})
    assert [note[:15] for note in told(tmp_path / "fine")] == ["the ring buffer"]
    uneven = {
        rank: [entry("nccl:_broadcast_oop", 1, input_sizes=[[size + rank]], **LATER) for size in (2, 3)] + [fast]
        for rank in range(2)
    }
    assert found(tmp_path / "uneven", uneven) == [], "as XCCL records an uneven all_gather, without an end"


def test_messages_are_matched_by_their_way(tmp_path: Path) -> None:
    there, back = message("0->1", 1, line=7), message("1->0", 2)
    theirs = [message("1<-0", 1), message("0<-1", 2)]
    mine = [there, {**back, "profiling_name": "nccl:recv 0<-1"}]
    peers = [theirs[0], {**theirs[1], "profiling_name": "nccl:send 1->0"}]
    assert found(tmp_path / "fine", {0: mine, 1: peers}) == []
    assert reading.read([tmp_path / "fine"]).traces[0][0].group == (0, 1)
    shorter = {**peers[0], "input_sizes": [[3]], "output_sizes": [[3]]}
    head, *_ = found(tmp_path / "size", {0: mine, 1: [shorter, peers[1]]})
    assert (
        head == "mismatch: message #0 from rank 0 to rank 1, tag 0, differs between its members in number of elements"
    )
    lines = found(tmp_path / "lost", {0: [mine[1], {**there, **STUCK}], 1: peers[1:]})
    assert "was never received by rank 1 (0 received on this way" in lines[1]
    assert "rank 0 did at /home/user/train.py:7" in lines[1]


def test_two_ranks_that_both_wait_to_receive_are_a_deadlock_even_in_cut_dumps(tmp_path: Path) -> None:
    old = [message("0->1", 1), message("1<-0", 1)]
    mine, theirs = [old[0], message("0<-1", 2, **STUCK)], [old[1], message("1<-0", 2, **STUCK)]
    for first in (0, 100):
        lines = found(tmp_path / str(first), {0: mine, 1: theirs}, first=first)
        assert lines[0].startswith("deadlock")
        assert lines[-1] == "  ring: rank 0 waits for rank 1 waits for rank 0"


def test_messages_that_ended_are_left_out_of_cut_dumps(tmp_path: Path) -> None:
    """Which of them the other side has dropped is not known."""
    write(tmp_path, {0: dump([message("0->1", number) for number in (4, 5)], WORLD, first=7)})
    write(tmp_path, {1: dump([message("1<-0", 5)], WORLD, first=9)})
    assert [note[:15] for note in told(tmp_path)] == ["the ring buffer"] * 2


def test_a_batch_of_messages_is_done_when_its_end_is(tmp_path: Path) -> None:
    end = entry("nccl:coalesced", 0, p2p_seq_id=1, is_p2p=True, input_sizes=[], output_sizes=[], input_dtypes=[],
                output_dtypes=[])  # fmt: skip
    parts = {
        0: [message("0->1", 1, **LATER), message("0<-1", 1, **LATER)],
        1: [message("1->0", 1, **LATER), message("1<-0", 1, **LATER)],
    }
    assert found(tmp_path / "fine", {rank: [*those, end] for rank, those in parts.items()}) == []
    notes = found(tmp_path / "under way", {rank: [*those, {**end, **STUCK}] for rank, those in parts.items()})
    assert len(notes) == 2, "both stand in their first, to which both have come"


def test_groups_are_numbered_by_their_ranks_and_messages_by_places_in_them(tmp_path: Path) -> None:
    """Group "a" of ranks 2 and 5: its member 0 is rank 2."""
    groups = {"a": (2, 5)}
    sent = message("0->1", 1, group="a")
    found(tmp_path, {2: [sent], 5: [message("1<-0", 1, group="a")]}, groups)
    assert reading.read([tmp_path]).traces[2][0].group == (2, 5)
    with pytest.raises(UsageError, match=r"message of member 1, but group 'a' has 1"):
        found(tmp_path / "bad", {0: [sent]}, {"a": (0,)})


_RING = """
a, b = (dist.new_group([0, 1], timeout=minute) for _ in range(2))
for _ in range(2):
    dist.all_reduce(torch.ones(3))
stuck_in(3)
dist.all_reduce(torch.ones(2), group=a if rank == 0 else b)
"""
_FINE = """
dist.all_reduce(torch.ones(3))
dist.all_gather_single(torch.zeros(2 * size), torch.ones(2))
dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(size)] if rank == 0 else None)
dist.all_gather_object([None] * size, rank)
for number in range(2):
    work = dist.all_reduce(torch.ones(6), async_op=True)
    work.wait()
group = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(torch.ones(1), group=group)
whole()
"""


def test_real_dumps_of_gloo_without_fault_are_read(tmp_path: Path) -> None:
    of_gloo(tmp_path, _FINE, 3)
    for form in ("pickles", "json"):
        job = reading.read([tmp_path / form])
        assert checking.finding(job) is None
        assert [len(job.traces[rank]) for rank in range(3)] == [8, 8, 7]
        assert [note.split(":")[0] for note in job.notes] == [
            "the dumps do not say who is in group '1'",
            "gloo's recorder holds no messages, not whether a call failed, and not which calls block",
        ]
    lines = [call.where for call in reading.read([tmp_path / "pickles"]).traces[0]]
    assert lines == [f"{tmp_path / 'program.py'}:{line}" for line in (2, 3, 4, 5, 5, 7, 7, 11)]


def test_a_real_ring_of_gloo_is_a_deadlock(tmp_path: Path) -> None:
    of_gloo(tmp_path, _RING)
    for form in ("pickles", "json"):
        lines = told(tmp_path / form)
        assert lines[0] == "deadlock: no rank can move (W = 2)"
        assert lines[-1] == "  ring: rank 0 waits for rank 1 waits for rank 0"
        assert lines[1].endswith(f", at {tmp_path / 'program.py'}:6" if form == "pickles" else "waiting for rank 1")
    (tmp_path / "pickles" / "trace_rank_1").unlink()
    assert "there is no dump of rank 1" not in "".join(told(tmp_path / "pickles")), "gloo's say not how many there are"


def test_pickles_that_name_anything_are_refused_and_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was run",))

    for what in (Runs(), {"version": "2.10", "entries": [Runs()]}, {"version": Path("x")}):
        (tmp_path / "rank_0").write_bytes(pickle.dumps(what, protocol=2))
        with pytest.raises(UsageError, match=r"its pickle names \S+, and a dump names nothing: it was not run"):
            reading.read([tmp_path])
    assert not (tmp_path / "was run").exists()
