"""Ranks under torchrun: they outlive failures of a run, and the other ranks end when the driver closes."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch._C._distributed_c10d as c10d

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines import torchrun
from fsdpcheck.engines._real import launch, post, shared_table
from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.remote_workers import FarLink, KeptLink, RowsOfNodes
from fsdpcheck.engines._real.shared_table import Header
from fsdpcheck.errors import NotSupported, UsageError
from fsdpcheck.execution import RunRequest
from fsdpcheck.execution.trace import Collective
from fsdpcheck.processes import zygote

Looked = TypeVar("Looked")
PROGRAM = Path(__file__).with_name("torchrun_program.py")
_TORCHRUN = """import os, sys
os.dup2(int(sys.argv.pop(1)), 2)
os.environ |= {"PYTHONPATH": sys.argv.pop(1), "OMP_NUM_THREADS": "1"}
from torch.distributed import run
run.main(sys.argv[1:])"""
"""torchrun, in a process that has torch imported; the ranks are programs that it starts."""


def launched(folder: Path, program: list[str], *, nodes: int = 1, per_node: int = 2) -> list[tuple[int, str]]:
    """What torchrun of each node ended with and wrote, when it ran ``program`` on all nodes; they are this machine."""
    with socket.create_server((launch.LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    agents = []
    for node in range(nodes):
        where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(per_node)]
        where += ["--master-addr", launch.LOOPBACK, "--master-port", str(port)]
        err = (folder / f"err{node}").open("w+")
        arguments = [str(err.fileno()), os.pathsep.join(filter(None, sys.path)), *where, *program]
        agents.append((zygote.start(_TORCHRUN, arguments, [err.fileno()], f"{os.getpid()}.torchrun{node}"), err))
    ended = []
    for agent, err in agents:
        code = agent.wait()
        err.seek(0)
        ended.append((code, err.read()))
        err.close()
    return ended


def told(folder: Path, attributes: list[str], **where: int) -> dict[str, Any]:
    for code, err in launched(folder, [str(PROGRAM), str(folder / "told"), *attributes], **where):
        assert code == 0, err
    read: dict[str, Any] = json.loads((folder / "told").read_text())
    return read


@pytest.mark.nightly  # by day tests/cli/test_run.py has a session under torchrun
def test_runs_fail_and_go_on_under_torchrun(tmp_path: Path) -> None:
    attributes = ["honest", "killed", "late_alone", "honest/1", "leaves", "handles_a_signal", "needs_no_handler"]
    found = told(tmp_path, attributes)
    assert found["kinds"] == [[1, 1], "lost", "deadlock", [1], "exited", [1, 1], [1, 1]]
    assert "rank 1 left torch.is_anomaly_enabled() on" in found["left"]
    assert [words for words in found["left"] if "signal handlers changed" in words] != []
    assert "wanted  at most 2" in found["refused"]


@pytest.mark.nightly  # two nodes
def test_a_hang_between_nodes_is_proved_too(tmp_path: Path) -> None:
    """Rows of another node come through the store; so do its stacks, its replies, and that a worker was killed."""
    found = told(tmp_path, ["honest", "late_alone", "killed", "honest/1", "leaves", "honest"], nodes=2, per_node=1)
    assert found["kinds"] == [[1, 1], "deadlock", "lost", [1], "exited", [1, 1]]
    assert found["stacks"][1] == [True, True], "both stand somewhere"
    assert "rank 1: in all_reduce(float64[2, 1]) avg #0 on ranks [0, 1]" in found["texts"][1]
    assert found["texts"][1].count(", at ") == 2
    assert "killed by SIGKILL" in found["texts"][2]
    assert found["seconds"][1] < 1


def test_outside_torchrun_it_is_refused() -> None:
    assert not torchrun.is_under_torchrun()
    with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
        torchrun.Ranks()


def said(rank: int, trouble: str = "", **versions: str) -> launch.Hello:
    return launch.Hello(
        rank, 0, f"host{rank}", os.getpid(), 0, {"torch": "2.13.0", "python": "3.11"} | versions, trouble
    )


def test_ranks_with_other_versions_are_refused_and_named() -> None:
    torchrun._require_alike((said(0), said(1)))
    with pytest.raises(
        UsageError, match=r"different versions of torch\n  got     rank 0 2.13.0 on host0, rank 1 2.12.1"
    ):
        torchrun._require_alike((said(0), said(1, torch="2.12.1")))
    with pytest.raises(UsageError, match="rank 1 on host1: --rank-files out: cannot be written"):
        torchrun._require_alike((said(0), said(1, "--rank-files out: cannot be written")))


@pytest.fixture
def store() -> c10d.TCPStore:
    return c10d.TCPStore(launch.LOOPBACK, 0, is_master=True, wait_for_workers=False)


def far(store: c10d.TCPStore) -> tuple[post.Post, FarLink]:
    """The keeper's side and the driver's of a worker of rank 1 on another node."""
    start = post.Start(7, Place(0, 2, 1, Path("/nowhere")), 0)
    return post.Post(store, 1), FarLink(post.Office(store, 2), 1, start, str)


def test_rows_of_another_node_are_read_as_their_keeper_tells_them(store: c10d.TCPStore, tmp_path: Path) -> None:
    keeper, link = far(store)
    assert keeper.take() == post.Start(7, Place(0, 2, 1, Path("/nowhere")), 0)
    assert keeper.take() is None
    calls = [Collective("all_reduce", (0, 1), "0", number) for number in range(3)]
    keeper.send(post.Moved(7, Header(2, 1, 1, 5, ()), tuple(calls[:1])))
    keeper.send(post.Moved(7, Header(4, 1, 2, 6, (1,)), tuple(calls[1:2])))
    shared_table.create(tmp_path / "table", 2)
    table = RowsOfNodes(tmp_path / "table", 2)
    table.far[1] = link
    header = until(lambda: table.read()[1], lambda read: read.calls == 2)
    assert (header.blocked, header.run, table.trace(1, header)) == ((1,), 1, tuple(calls[:2]))
    assert header.moved > 6, "a clock of another node is none of ours"
    assert table.snapshot() is not None
    keeper.send(post.Moved(7, Header(6, 2, 1, 7, ()), tuple(calls[2:])))
    header = until(lambda: table.read()[1], lambda read: read.run == 2)
    assert table.trace(1, header) == (calls[2],), "a new run forgets the calls of the last"


def test_the_end_of_a_worker_on_another_node_is_told_with_its_last_words(store: c10d.TCPStore) -> None:
    keeper, link = far(store)
    keeper.send(post.Started(7, 4711, False))
    keeper.send(post.Reply(7, b"ready"))
    keeper.send(post.Life(7, 1.5, "asleep"))
    assert until(link.receive, lambda payload: payload is not None) == b"ready"
    assert (until(lambda: link.pid, bool), link.sees, link.exit_code()) == (4711, False, None)
    assert (link.processor_seconds(), link.sleep()) == (1.5, "asleep")
    keeper.send(post.Ended(7, -6, "what(): gloo"))
    assert until(link.exit_code, lambda code: code is not None) == -6
    assert link.last_words(Path("/nowhere")) == "what(): gloo"


def test_a_worker_whose_keeper_is_gone_has_ended(store: c10d.TCPStore) -> None:
    start = post.Start(7, Place(0, 2, 1, Path("/nowhere")), 0)
    link = KeptLink(post.Office(store, 2), 1, start, lambda: "it is gone")
    assert (link.exit_code(), link.last_words(Path("/nowhere"))) == (-9, "it is gone")


def test_a_checkpoint_between_nodes_without_a_folder_in_common_is_not_supported(store: c10d.TCPStore) -> None:
    keeper, link = far(store)
    keeper.send(post.Started(7, 4711, False))
    until(lambda: link.pid, bool)
    pool = cast(Any, SimpleNamespace(table=SimpleNamespace(far={1: link})))
    asked = RunRequest(TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(2)), "reference")
    torchrun._require_shared_folder(pool, asked)
    with pytest.raises(NotSupported, match="set TMPDIR"):
        torchrun._require_shared_folder(pool, replace(asked, save_to="/tmp/x"))


def until(look: Callable[[], Looked], found: Callable[[Looked], bool]) -> Looked:
    """What ``look`` gives when it is what was sent: the driver asks for news no more often than each millisecond."""
    while not found(seen := look()):
        pass
    return seen


def test_what_a_rank_sends_may_be_larger_than_the_store_takes_at_once(store: c10d.TCPStore) -> None:
    """A reply of 17 MB, of a law about the distribution of noise, ended torchrun's store and with it the session."""
    for payload in (b"", b"x", bytes(range(256)) * (1 << 16) + b"end"):
        assert post.taken(store, "key") is None
        post.give(store, "key", payload)
        assert post.taken(store, "key") == payload
