"""Sessions under torchrun that something ends from outside: what was found is kept, and who ended it is named."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.engines._real.contact import SILENCE_SECONDS
from tests.common.commands import TOYS
from tests.common.network_namespaces import two_machines, why_not
from tests.common.torchrun_jobs import FOUND, LASTING, job, rank_files, rank_process

NO_NAMESPACES = why_not()


def kept(folder: Path, out: str) -> dict[str, Any]:
    """The report of a session that was ended, after it was looked at: what was found is in it and was printed."""
    assert "interrupted: 0 checks hold, 1 finding of 1 root, 1 not reached" in out
    data: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert (data["interrupted"], data["exit_code"]) == (True, 130)
    assert [verdict["status"] for verdict in data["verdicts"]] == ["finding"]
    return data


@pytest.mark.nightly  # by day tests/engines/test_contact.py: it waits for the minute that a node may be silent
def test_a_node_that_is_stopped_ends_the_session_with_what_was_found(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING, nodes=2, per_node=1) as (driver, other):
        driver.until(FOUND)
        other.signal(signal.SIGSTOP)
        assert driver.process.wait(SILENCE_SECONDS + 120) == 1
        (note,) = [text for text in kept(tmp_path, driver.out)["notes"] if "contact" in text]
        assert note.startswith("lost contact with rank 1 on ")
        assert "nothing was heard of it for 60 s" in note
        assert rank_files(tmp_path) == {0: 130, 1: None}
        assert "Traceback" not in driver.err.partition("failed (exitcode: 130)")[0]


@pytest.mark.nightly  # as above
def test_ranks_whose_driver_is_on_a_node_that_is_stopped_end_themselves(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING, nodes=2, per_node=1) as (driver, other):
        driver.until(FOUND)
        began = other.descendants()
        driver.signal(signal.SIGSTOP)
        assert other.process.wait(SILENCE_SECONDS + 120) == 1
        assert "ends: torchrun's store was silent for 60 s" in other.err
        assert "Traceback" not in other.err.partition("failed (exitcode: 130)")[0]
        assert rank_files(tmp_path) == {0: None, 1: 130}
        assert [pid for pid in began if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.nightly  # as above
@pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"no two machines can be made here: {NO_NAMESPACES}")
def test_machines_that_lose_each_other_both_end_with_what_was_found(tmp_path: Path) -> None:
    """Each on a network of its own; once the link is gone nothing reaches either, not even the end of a connection."""
    with two_machines() as machines, job(tmp_path, *LASTING, nodes=2, per_node=1, machines=machines) as agents:
        driver, other = agents
        driver.until(FOUND)
        machines[1].cut_off()
        assert driver.process.wait(SILENCE_SECONDS + 120) == 1
        (note,) = [text for text in kept(tmp_path, driver.out)["notes"] if "contact" in text]
        assert note.startswith("lost contact with rank 1 on ")
        assert other.process.wait(SILENCE_SECONDS + 120) == 1
        assert "ends: torchrun's store was silent for 60 s" in other.err
        assert rank_files(tmp_path) == {0: 130, 1: 130}


@pytest.mark.nightly  # as those below, each starts torchrun; by day see tests/engines/test_contact.py
def test_sigterm_to_torchrun_keeps_what_was_found(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING) as (agent,):
        agent.until(FOUND)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(100) == 1
        assert [text for text in kept(tmp_path, agent.out)["notes"] if not text.startswith("ranks: 2")] == []
        assert rank_files(tmp_path) == {0: 130, 1: 130}


@pytest.mark.nightly
def test_sigterm_to_the_torchrun_of_another_node_does_too(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING, nodes=2, per_node=1) as (driver, other):
        driver.until(FOUND)
        other.process.send_signal(signal.SIGTERM)
        assert (driver.process.wait(100), other.process.wait(100)) == (1, 1)
        assert "torchrun told it to end" in kept(tmp_path, driver.out)["notes"][-1]
        assert rank_files(tmp_path) == {0: 130, 1: 130}


@pytest.mark.nightly
def test_a_process_of_torchrun_that_is_killed_is_named(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING) as (agent,):
        agent.until(FOUND)
        os.kill(rank_process(agent, 1), signal.SIGKILL)
        assert agent.process.wait(100) == 1
        notes = kept(tmp_path, agent.out)["notes"]
        assert notes[-1] == "torchrun ended the job: its process of rank 1 is gone"
        assert rank_files(tmp_path) == {0: 130, 1: None}


@pytest.mark.nightly  # by day tests/engines/test_lifeline.py
def test_a_process_of_another_node_that_is_killed_is_named_at_once(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING, nodes=2, per_node=1) as (driver, other):
        driver.until(FOUND)
        os.kill(rank_process(other, 1), signal.SIGKILL)
        assert (driver.process.wait(100), other.process.wait(100)) == (1, 1)
        note = kept(tmp_path, driver.out)["notes"][-1]
        assert note.startswith("lost contact with rank 1 on ")
        assert "its process has ended" in note, "and not after a minute of silence"
        assert rank_files(tmp_path) == {0: 130, 1: None}


@pytest.mark.nightly
def test_where_torchrun_itself_is_killed_its_ranks_end_with_what_was_found(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING) as (agent,):
        agent.until(FOUND)
        began = agent.descendants()
        agent.process.kill()
        agent.process.wait()
        while [pid for pid in began if Path(f"/proc/{pid}").exists()]:
            pass
        assert kept(tmp_path, agent.out)["notes"][-1].startswith("torchrun is gone: its store")
        assert rank_files(tmp_path) == {0: 130, 1: 130}


@pytest.mark.nightly
def test_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    """It ends where a module is imported, while rank 0 waits for it."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1':\n"
        "    while not os.path.exists('ranks/rank0.json'):\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(1)\n"
        "    os._exit(7)\n"
    )
    with job(tmp_path, *LASTING, path=modules) as (agent,):
        assert agent.process.wait(100) == 1
        assert "ranks did not start before torchrun ended the job" in agent.err
        assert "got     nothing of rank 1" in agent.err
        assert "exitcode  : 7" in agent.err, "torchrun says what it ended with"
        assert rank_files(tmp_path) == {0: 2}


@pytest.mark.nightly
def test_a_port_that_is_taken_is_torchruns_own_error_and_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with job(tmp_path, *LASTING, port=port) as (agent,):
            assert agent.process.wait(100) == 1
            assert f"port: {port}" in agent.err
            assert "EADDRINUSE" in agent.err
    assert not (tmp_path / "ranks").exists(), "no rank was started"


@pytest.mark.nightly
def test_meshes_of_two_axes_are_drawn_on_four_ranks(tmp_path: Path) -> None:
    laws = ["--law", "training.plain", "--profile", "quick", "--world-size", "4"]
    with job(tmp_path, "-m", "fsdpcheck", "run", "--adapter", "reference", *laws, "--json", "out.json", per_node=4) as (
        agent,
    ):
        assert agent.process.wait(400) == 0
    (verdict,) = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    assert verdict["census"]["W=4"] == verdict["cases"]
    assert verdict["census"]["hsdp"] > 0, "that trait is a case with replicas: dp_replicate 2 of 4 ranks"


@pytest.mark.nightly
def test_own_parts_and_a_budget_are_taken(tmp_path: Path) -> None:
    own = f"{TOYS / 'own_parts.py'}:"
    parts = ["--model", own + "build", "--batch", own + "batch", "--parallelize", own + "parallelize"]
    asked = [*parts, "--step", "step", "--law", "training.plain", "--profile", "quick", "--json", "out.json"]
    with job(tmp_path, "-m", "fsdpcheck", "run", *asked) as (agent,):
        assert agent.process.wait(300) == 0, agent.out + agent.err
    (verdict,) = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    assert (verdict["status"], verdict["cases"] > 1) == ("holds", True)
    with job(tmp_path, "-m", "fsdpcheck", "run", *asked, "--budget", "0.01") as (agent,):
        assert agent.process.wait(300) == 1
    assert "budget" in agent.out
