"""On what ranks compute and over what they speak: names, what a machine lacks, and NCCL's part with a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import engines
from fsdpcheck.engines._common import metal
from fsdpcheck.engines._common.metal import Metal
from fsdpcheck.engines._real import backends, groups, shared_table
from fsdpcheck.engines._real.backends import NativeNccl
from fsdpcheck.engines._real.launch import Hello
from fsdpcheck.engines._real.shared_table import Row, Table
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.torchrun import _require_gpus
from fsdpcheck.errors import OtherWorldSize, UsageError

GPU = torch.device("cuda", 1)


def test_the_options_name_every_kind_of_ranks_and_nothing_else() -> None:
    named = {
        (engine, device, backend): name
        for engine in ("simulated", "processes")
        for device in ("cpu", "cuda")
        for backend in (None, "gloo", "nccl")
        if (name := _kind(engine, cast(Any, device), backend))
    }
    assert named == {
        ("simulated", "cpu", None): "simulated",
        ("simulated", "cuda", None): "simulated-cuda",
        ("processes", "cpu", None): "processes",
        ("processes", "cpu", "gloo"): "processes",
        ("processes", "cuda", None): "nccl",
        ("processes", "cuda", "nccl"): "nccl",
        ("processes", "cuda", "gloo"): "gloo-cuda",
    }


def _kind(engine: str, device: metal.Device, backend: str | None) -> str:
    try:
        return metal.kind_of(engine, device, backend)
    except UsageError:
        return ""


def test_ranks_that_there_are_not_are_named() -> None:
    with pytest.raises(
        UsageError, match="there are no such ranks\n  got     --engine processes --device cpu --backend nccl"
    ):
        metal.kind_of("processes", "cpu", "nccl")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has this machine have so many GPUs, as far as torch is asked, and NCCL."""

    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    return there_are


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kind", ["simulated-cuda", "gloo-cuda", "nccl"])
def test_ranks_on_gpus_are_refused_where_there_is_none(kind: str) -> None:
    with pytest.raises(UsageError, match=r"need one; this is torch [^\n]*\n  next    leave --device cuda out"):
        engines.open_engine(kind)


def test_nccl_takes_a_gpu_for_each_rank_and_gloo_shares_them(gpus: Callable[[int], None]) -> None:
    gpus(2)
    nccl, gloo = Metal("cuda", "nccl"), Metal("cuda", "gloo")
    assert [nccl.lacks(2), gloo.lacks(5)] == ["", ""]
    assert nccl.lacks(3) == "NCCL takes a GPU for each rank: 3 ranks, 2 GPUs"
    assert [str(gloo.of_rank(rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(nccl.of_rank(rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="next    --backend gloo, whose ranks share a GPU, or fewer ranks"):
        metal.require(nccl, 3)


def test_cases_over_nccl_have_no_more_ranks_than_there_are_gpus(gpus: Callable[[int], None]) -> None:
    gpus(2)
    engine = engines.open_engine("nccl")
    assert isinstance(engine, ProcessesEngine)
    assert engine.declared("ddp").features.max_world_size == 2
    assert engines.open_engine("processes").declared("ddp").features.max_world_size is None
    with pytest.raises(OtherWorldSize, match="3 ranks, 2 GPUs") as caught:
        engine.run(cast(Any, _Request(3)))
    assert caught.value.there == 2


class _Request:
    def __init__(self, world_size: int) -> None:
        self.case = self
        self.world_size = world_size


def test_a_node_with_too_few_gpus_is_told_before_anything_runs(gpus: Callable[[int], None]) -> None:
    gpus(2)
    known = tuple(Hello(rank, rank // 2, f"host{rank // 2}", 1, 2 - rank // 2) for rank in range(4))
    _require_gpus(known, Metal("cuda", "gloo"))
    _require_gpus(known, metal.GLOO)
    with pytest.raises(UsageError, match="too few GPUs\n  got     1 GPU for 2 ranks on host1\n  wanted  at least 2"):
        _require_gpus(known, Metal("cuda", "nccl"))


def test_a_finding_is_run_again_on_ranks_like_those_that_met_it(gpus: Callable[[int], None]) -> None:
    kinds = ("simulated", "processes", "torchrun", "nccl", "torchrun-nccl", "torchrun-gloo-cuda", "of a later release")
    gpus(0)
    here = ["simulated", "processes", "processes", "simulated", "simulated", "simulated", "simulated"]
    assert [metal.that_replays(kind) for kind in kinds] == here
    gpus(2)
    there = ["simulated", "processes", "processes", "nccl", "nccl", "gloo-cuda", "simulated"]
    assert [metal.that_replays(kind) for kind in kinds] == there


class PlayedNccl:
    """A group that queues its calls, as NCCL does: to wait for a work only orders streams."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def allreduce(self, tensors: object, options: object) -> str:
        return "queued"

    def send(self, tensors: object, to: int, tag: int) -> None:
        self.asked.append(("send", to))

    def recv(self, tensors: object, source: int, tag: int) -> None:
        self.asked.append(("recv", source))

    def barrier(self, options: Any) -> str:
        self.asked.append(("barrier", list(options.device_ids)))
        return "queued"

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append("together")

    def _end_coalescing(self, device: torch.device) -> str:
        return "queued together"


@pytest.fixture
def row(tmp_path: Path) -> Iterator[tuple[Row, Table]]:
    shared_table.create(tmp_path / "table", 2)
    own, table = Row(tmp_path / "table", 0), Table(tmp_path / "table", 2)
    own.begin(1)
    yield own, table
    table.close()


class Watched(NativeNccl):
    """Says while the GPU is waited for, and while calls are issued, in what the rank is said to be blocked."""

    def __init__(self, group: PlayedNccl, table: Table) -> None:
        super().__init__(group, GPU)
        self.table, self.seen = table, list[int | None]()

    def settle(self) -> None:
        self.seen.append(self.table.read()[0].blocked_in)


class Work:
    """A work of NCCL: ``wait`` returns at once."""

    def wait(self) -> None: ...


def group_of(row: Row, native: NativeNccl) -> groups.RealGroup:
    made = groups.RealGroup(0, 2, native, row)
    made.stand_for("g", (0, 1))
    return made


def test_who_waits_for_nccl_is_blocked_until_the_gpu_is_done(row: tuple[Row, Table]) -> None:
    native = Watched(PlayedNccl(), row[1])
    work = group_of(row[0], native).allreduce([torch.ones(1)])
    assert row[1].read()[0].blocked_in is None, "to queue a call waits for nobody"
    work._work = Work()
    work.wait()
    assert native.seen == [0]
    assert row[1].read()[0].blocked_in is None


def test_the_first_message_of_a_pair_waits_for_its_communicator(row: tuple[Row, Table]) -> None:
    seen = list[int | None]()

    class Meeting(PlayedNccl):
        def send(self, tensors: object, to: int, tag: int) -> None:
            seen.append(row[1].read()[0].blocked_in)

        recv = send

    group = group_of(row[0], NativeNccl(Meeting(), GPU))
    group.send([torch.ones(1)], 1, 0)
    group.recv([torch.ones(1)], 1, 0)
    group.send([torch.ones(1)], 1, 0)
    assert seen == [0, None, None]


def test_messages_that_are_issued_together_are_one_call_of_nccl(row: tuple[Row, Table]) -> None:
    played = PlayedNccl()
    group = group_of(row[0], NativeNccl(played, GPU))
    group._start_coalescing(GPU)
    group.send([torch.ones(1)], 1, 0)
    group.recv([torch.ones(1)], 1, 0)
    together = group._end_coalescing(GPU)
    assert played.asked == ["together", ("send", 1), ("recv", 1)]
    assert [work._work for work in together.works] == ["queued together"] * 2


def test_a_barrier_of_nccl_is_on_the_gpu_of_the_rank(row: tuple[Row, Table]) -> None:
    played = PlayedNccl()
    group_of(row[0], NativeNccl(played, GPU)).barrier()
    assert played.asked == [("barrier", [1])]


def test_how_ranks_are_connected_follows_the_metal() -> None:
    gloo = backends.connecting(metal.GLOO, torch.device("cpu"), "127.0.0.1")
    nccl = backends.connecting(Metal("cuda", "nccl"), GPU, "127.0.0.1")
    assert cast(Any, gloo).func is backends.over_gloo
    assert (cast(Any, nccl).func, cast(Any, nccl).keywords) == (backends.over_nccl, {"device": GPU})
