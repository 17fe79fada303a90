"""What the server that processes are forked from leaves on the machine: nothing."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from fsdpcheck.compat import multiprocessing_private
from fsdpcheck.processes import leftovers, zygote

_STARTS = """
import os, signal, sys
from fsdpcheck.processes import fork_server
fork_server.fork()
os.write(int(sys.argv[1]), b"begun")
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_files_of_a_session_that_is_killed_go_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"{os.getpid()}.files"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's name may not be as long as tmp_path makes it
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        read, write = os.pipe()
        process = zygote.start(_STARTS, [str(write)], [write], mark)
        os.close(write)
        begun = os.read(read, 8)
        os.close(read)
        kept = {path.name for path in Path(folder).iterdir() if path.name.startswith(("fsdpcheck-", "pymp-"))}
        ended = leftovers.clear(process.pid, mark)
        process.wait()
        assert (begun, ended > 0) == (b"begun", True)
        assert [name.startswith(f"fsdpcheck-{mark}-") for name in kept] == [True]
        assert not kept & {path.name for path in Path(folder).iterdir()}


def test_a_name_that_would_be_too_long_for_a_socket_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("f" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    config: dict[str, object] = {}
    monkeypatch.setattr("multiprocessing.process.current_process", lambda: type("P", (), {"_config": config})())
    multiprocessing_private.keep_its_files_in("fsdpcheck-")
    assert (config, list(long.iterdir())) == ({}, [])
