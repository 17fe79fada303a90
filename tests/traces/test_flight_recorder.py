"""Flight-Recorder dumps of simulated runs: torch's own analyser of the installed release reads them and agrees."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from fsdpcheck import simulate
from fsdpcheck.traces import checking, flight_recorder, reading
from fsdpcheck.traces.job import of_simulation
from tests.common.releases import all_gather_single, reads_dumps_of_gloo, reduce_scatter_single


def _all_kinds() -> None:
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, dtype=torch.int64), 1)
    dist.all_gather([torch.zeros(2, 2) for _ in range(size)], torch.ones(2, 2))
    all_gather_single(torch.zeros(2 * size), torch.ones(2))
    reduce_scatter_single(torch.zeros(2), torch.ones(2 * size))
    dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(size)] if rank == 0 else None)
    dist.scatter(torch.zeros(2), [torch.ones(2) for _ in range(size)] if rank == 0 else None)
    dist.all_to_all_single(torch.zeros(size), torch.ones(size))
    dist.reduce(torch.ones(3, dtype=torch.bfloat16), 1)
    dist.barrier()
    dist.all_gather([torch.zeros(1 + other) for other in range(size)], torch.ones(1 + rank))
    dist.reduce_scatter(torch.zeros(1 + rank), [torch.ones(1 + other) for other in range(size)])
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=pair)


def _one_skips() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() != 1:
        dist.broadcast(torch.ones(2), 0)


def _shapes_differ() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


def _kinds_differ() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def _dumps(program: Callable[[], None], folder: Path, size: int = 3) -> Any:
    done = simulate(program, size, show=False)
    flight_recorder.write(of_simulation(done), folder)
    return done


def _torch_says(folder: Path) -> Any:
    """The data base that torchfrtrace makes of a folder."""
    options = JobConfig().parse_args([str(folder)])
    try:
        return build_db(*_reordered(read_dir(options), options))
    finally:
        gc.enable()  # which read_dir disables


def _reordered(read: tuple[Any, str], options: Any) -> tuple[Any, Any, str]:
    return read[0], options, read[1]


@reads_dumps_of_gloo
def test_torch_matches_every_collective_of_a_run_without_fault(tmp_path: Path) -> None:
    done = _dumps(_all_kinds, tmp_path)
    base = _torch_says(tmp_path)
    assert all(found.pass_check for found in base.collectives)
    assert len(base.collectives) == len(done.traces[0]) == 13
    assert [found.collective_name.partition(":")[2].removesuffix("_v") for found in base.collectives] == [
        call.op for call in done.traces[0]
    ]
    assert {(group.id[0], group.size) for group in base.groups} == {("0", 3), ("1", 2)}
    assert base.collectives[0].collective_frames[0]["filename"] == __file__
    job = reading.read([tmp_path])
    assert (checking.finding(job), job.notes) == (None, ())


@reads_dumps_of_gloo
def test_torch_misses_the_rank_that_never_came(tmp_path: Path) -> None:
    done = _dumps(_one_skips, tmp_path)
    assert done.failure.kind == "deadlock"
    fine, faulty = _torch_says(tmp_path).collectives
    assert (fine.missing_ranks, faulty.missing_ranks) == (None, {1})
    assert faulty.collective_name == "gloo:broadcast"
    found = checking.finding(reading.read([tmp_path]))
    assert found is not None
    assert "broadcast(float32[2]) #2 on ranks [0, 1, 2] was never called by rank 1 (1 call on this group)" in found.text


@reads_dumps_of_gloo
@pytest.mark.parametrize(
    ("program", "theirs", "ours"),
    [
        (_shapes_differ, "SIZE_OR_SYNTAX_MISMATCH", "in input shape"),
        (_kinds_differ, "COLLECTIVE_TYPE_MISMATCH", "in op"),
    ],
)
def test_torch_finds_the_rank_whose_call_differs(
    tmp_path: Path, program: Callable[[], None], theirs: str, ours: str
) -> None:
    assert _dumps(program, tmp_path).failure.kind == "mismatch"
    (found,) = _torch_says(tmp_path).collectives
    (culprit,) = found.mismatch_collectives
    assert culprit == 2
    assert theirs in str(found.mismatch_collectives[2].type_of_mismatch)
    own = checking.finding(reading.read([tmp_path]))
    assert own is not None
    assert ours in own.text.split("\n")[0]


def _messages() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)


def test_messages_are_written_as_nccl_records_them(tmp_path: Path) -> None:
    done = _dumps(_messages, tmp_path, 2)
    (sent,) = pickle.loads((tmp_path / f"{flight_recorder.PREFIX}0").read_bytes())["entries"]
    known = ("profiling_name", "is_p2p", "p2p_seq_id", "input_sizes", "output_sizes")
    assert [sent[name] for name in known] == ["gloo:send 0->1", True, 1, [[2]], [[2]]]
    job = reading.read([tmp_path])
    assert [call.op for trace in job.traces.values() for call in trace] == ["send", "recv"]
    assert [(call.group, call.inputs, call.where) for call in job.traces[0]] == [
        (call.group, call.inputs, call.where) for call in done.traces[0]
    ]
    assert checking.finding(job) is None
