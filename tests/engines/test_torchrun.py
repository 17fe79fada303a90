"""Ranks under torchrun: they outlive failures of a run, and the other ranks end when the driver closes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d

from fsdpcheck.engines import torchrun
from fsdpcheck.errors import UsageError
from fsdpcheck.processes import zygote

PROGRAM = Path(__file__).with_name("torchrun_program.py")
_TORCHRUN = """import os, sys
os.dup2(int(sys.argv.pop(1)), 2)
os.environ |= {"PYTHONPATH": sys.argv.pop(1), "OMP_NUM_THREADS": "1"}
from torch.distributed import run
run.main(["--standalone", "--nproc-per-node", "2", *sys.argv[1:]])"""
"""torchrun, in a process that has torch imported; the ranks are programs that it starts."""


@pytest.mark.nightly  # by day tests/cli/test_run.py has a session under torchrun
def test_runs_fail_and_go_on_under_torchrun(tmp_path: Path) -> None:
    attributes = ["honest", "killed", "late_alone", "leaves", "handles_a_signal", "needs_no_handler"]
    with (tmp_path / "err").open("w+") as err:
        arguments = [str(err.fileno()), os.pathsep.join(filter(None, sys.path)), str(PROGRAM), str(tmp_path / "told")]
        done = zygote.start(_TORCHRUN, [*arguments, *attributes], [err.fileno()], f"{os.getpid()}.torchrun").wait()
        err.seek(0)
        assert done == 0, err.read()
    told = json.loads((tmp_path / "told").read_text())
    assert told["kinds"] == [[1, 1], "lost", "deadlock", "exited", [1, 1], [1, 1]]
    assert "rank 1 left torch.is_anomaly_enabled() on" in told["left"]
    assert [words for words in told["left"] if "signal handlers changed" in words] != []
    assert "wanted  world size 2" in told["refused"]


def test_outside_torchrun_it_is_refused() -> None:
    assert not torchrun.is_under_torchrun()
    with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
        torchrun.TorchrunEngine()


def test_what_a_rank_sends_may_be_larger_than_the_store_takes_at_once() -> None:
    """A reply of 17 MB, of a law about the distribution of noise, ended torchrun's store and with it the session."""
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for payload in (b"", b"x", bytes(range(256)) * (1 << 16) + b"end"):
        assert torchrun._taken(store, "key") is None
        torchrun._give(store, "key", payload)
        assert torchrun._taken(store, "key") == payload
