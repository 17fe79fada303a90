"""Chrome trace events of simulated runs: what Perfetto draws of them, and that they are read back as they were."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdpcheck import Simulation, simulate
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.traces import checking, chrome
from fsdpcheck.traces.job import of_simulation


def _sharded() -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()


def _several_groups() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in range(2)]
    works = [dist.all_reduce(torch.ones(3), group=pairs[k], async_op=True) for k in range(2) if rank in (k, k + 1)]
    dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))
    for work in works:
        work.wait()
    if rank < 2:
        there = dist.isend(torch.ones(2), 1 - rank, tag=5)
        dist.recv(torch.ones(2), 1 - rank, tag=5)
        there.wait()


def _hangs() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), async_op=True)
    if dist.get_rank():
        dist.barrier()


RUNS = [(_sharded, 2), (_several_groups, 3), (_hangs, 2)]


def _document(done: Simulation) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(chrome.document(of_simulation(done))))
    return written


def _tracks(document: dict[str, Any], phase: str) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == phase:
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


@pytest.mark.parametrize(("program", "size"), RUNS)
def test_bars_of_a_track_do_not_overlap_and_arrows_join_the_members_of_a_call(program: Any, size: int) -> None:
    """What Perfetto leaves out without a word: bars that overlap, arrows that begin or end beside a bar."""
    document = _document(simulate(program, size, show=False))
    names = {key: names for key, names in _tracks(document, "M").items()}
    bars = _tracks(document, "X")
    assert bars.keys() <= names.keys()
    for track in bars.values():
        track.sort(key=lambda bar: bar["ts"])
        assert all(bar["dur"] > 0 for bar in track)
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(track))
    arrows = defaultdict(list)
    for phase in "stf":
        for (pid, tid), marks in _tracks(document, phase).items():
            for mark in marks:
                (bar,) = [one for one in bars[pid, tid] if one["ts"] <= mark["ts"] < one["ts"] + one["dur"]]
                arrows[mark["id"]].append((mark["ts"], phase, pid - 1, bar["args"]))
    for joined in arrows.values():
        joined.sort(key=lambda mark: (mark[0], "stf".index(mark[1])))
        assert [phase for _, phase, *_ in joined] == ["s", *"t" * (len(joined) - 2), "f"]
        calls = {(call["group"], tuple(call["ranks"]), call["number"], call["tag"]) for *_, call in joined}
        assert len(calls) == 1
        assert sorted(rank for _, _, rank, _ in joined) == sorted(call["ranks"] if (call := joined[0][3]) else ())
    assert len(arrows) > 0


@pytest.mark.parametrize(("program", "size"), RUNS)
def test_what_was_written_is_read_back(program: Any, size: int) -> None:
    done = simulate(program, size, show=False)
    job, back = of_simulation(done), chrome.read(_document(done))
    assert back.traces == job.traces
    for mine, theirs in zip(done.traces, back.traces.values(), strict=True):
        assert list(map(dataclasses.asdict, mine)) == list(map(dataclasses.asdict, theirs))
    assert [list(map(tuple, back.times[rank])) for rank in range(size)] == [list(times) for times in done.times]
    assert (back.states, back.world_size) == (job.states, size)
    found = checking.finding(back)
    assert (found and found.text) == (done.failure and done.failure.text)


def test_a_file_of_a_version_that_did_not_know_callers_is_read() -> None:
    done = simulate(_several_groups, 3, show=False)
    document = _document(done)
    callers = [event["args"].pop("called_at") for event in document["traceEvents"] if "op" in event.get("args", ())]
    assert any(callers)
    assert chrome.read(document).traces == of_simulation(done).traces, "who called is not compared"


def test_issue_wait_and_completion_are_apart_and_a_call_that_never_ended_lasts() -> None:
    done = simulate(_hangs, 2, show=False)
    document = _document(done)
    program, group = (track for (pid, _), track in _tracks(document, "X").items() if pid == 2)
    assert [bar["name"] for bar in program] == [
        "all_reduce", "wait for all_reduce", "all_reduce", "barrier", "wait for barrier",
    ]  # fmt: skip
    assert [(bar["name"], bar["args"]["state"]) for bar in group] == [
        ("all_reduce", "complete"), ("all_reduce", "complete"), ("barrier, never complete", "never complete"),
    ]  # fmt: skip
    assert len({bar["ts"] + bar["dur"] for bar in (program[-1], group[-1])}) == 1
    marks = [mark["name"] for marks in _tracks(document, "i").values() for mark in marks]
    assert marks == ["finished", "blocked: barrier() #2 on ranks [0, 1]"]
    bar = group[0]["args"]
    assert (bar["op"], bar["inputs"], bar["reduce_op"]) == ("all_reduce", [{"dtype": "float32", "shape": [3]}], "sum")
    assert bar["where"].startswith(f"{__file__}:")


def test_a_sharded_step_names_the_lines_of_the_program_and_its_units() -> None:
    done = simulate(_sharded, 2, show=False).check()
    assert {call.where.rpartition(":")[0] for trace in done.traces for call in trace} == {__file__}
    bars = [bar["name"] for track in _tracks(_document(done), "X").values() for bar in track if bar["cat"] == "call"]
    assert {"all_gather of 0", "reduce_scatter of 1"} <= set(bars)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.pop("otherData"), "none that fsdpcheck wrote"),
        (lambda data: data["otherData"].update(schema=9), "schema is 9"),
        (lambda data: data["otherData"].update(ranks="x"), "otherData.ranks is 'x'"),
        (lambda data: data["otherData"].update(ranks=1), "is of rank 1 of 1"),
        (lambda data: data["otherData"].update(failure={}), "otherData.failure has no 'kind'"),
        (lambda data: data.update(traceEvents=7), "traceEvents is int"),
        (lambda data: [event.get("args", {}).pop("op", 0) for event in data["traceEvents"]], r"args has no 'op'"),
        (lambda data: [event.get("args", {}).update(times=[]) for event in data["traceEvents"]], "has 0 times"),
        (
            lambda data: [event.get("args", {}).update(tag=0, ranks=[0]) for event in data["traceEvents"]],
            "has 1 times and 1 ranks|has 3 times and 1 ranks",
        ),
    ],
)
def test_other_traces_and_broken_ones_are_told(change: Any, why: str) -> None:
    data = _document(simulate(_hangs, 2, show=False))
    change(data)
    with pytest.raises(Unreadable, match=why):
        chrome.read(data)
