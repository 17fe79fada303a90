"""PyTorch's own tests pass on simulated ranks where they pass on gloo, but for a table of reasons that only shrinks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.common.commands import environment
from tests.torch_suite import results, runner
from tests.torch_suite.results import Line, Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "torch-suite.md"
BY_DAY = (
    *("test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync", "test_all_reduce_sum_complex"),
    *(
        "test_all_to_all_single_unequal_split",
        "test_batch_isend_irecv_gloo",
        "test_gather_object_subgroup",
        "test_get_rank",
    ),
    *("test_scatter_complex", "test_send_recv_any_source_torch_profiler", "test_sparse_all_reduce_sum"),
)


def _ran(out: Path, *arguments: str) -> list[Line]:
    """The lines of PyTorch's tests, run by a program, for they read their environment when they are imported."""
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
    command = [sys.executable, "-W", "ignore", runner.__file__, "--out", str(out), *arguments]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return results.read(out)


def test_a_handful_passes_on_simulated_ranks(tmp_path: Path) -> None:
    lines = _ran(tmp_path / "lines", "--kinds", "simulated", *BY_DAY)
    assert [(line.test, line.status, line.reason) for line in lines] == [(name, "passed", "") for name in BY_DAY]


@pytest.mark.nightly
def test_simulated_ranks_differ_from_gloo_by_the_table_and_no_more(tmp_path: Path) -> None:
    lines, known = _ran(tmp_path / "lines", "--kinds", "simulated,gloo"), results.known()
    assert len(results.passing(lines)) > 100
    assert {test: said for test, said in results.differences(lines).items() if test not in known} == {}
    assert known.keys() & results.passing(lines) == set(), "these pass now: take them out of known.json"


def test_the_document_says_what_the_record_says() -> None:
    lines, known = results.read(results.RECORD), results.known()
    assert results.markdown(lines) in DOCUMENT.read_text()
    assert results.differences(lines).keys() == known.keys()
    by_kind = [{(line.test, line.size) for line in lines if line.kind == kind} for kind in results.KINDS]
    assert by_kind[0] == by_kind[1] == by_kind[2]
    assert sum(map(len, by_kind)) == len(lines)


def test_a_test_that_crashes_or_does_not_end_ends_alone() -> None:
    assert runner.judged(lambda: Outcome("passed"))[0] == Outcome("passed")
    crashed = runner.judged(lambda: os.kill(os.getpid(), signal.SIGKILL))[0]  # type: ignore[arg-type, return-value]
    assert (crashed.status, crashed.reason) == ("killed", "its process ended by SIGKILL")
    endless = runner.judged(signal.pause, guard=0.1)[0]  # type: ignore[arg-type]
    assert (endless.status, endless.reason) == ("killed", "it had not ended after 0.1 seconds")


def test_a_difference_is_what_passes_on_gloo_alone(tmp_path: Path) -> None:
    line = Line("test_a", "gloo", 4, "passed", "", 2.0, 1.0)
    lines = [
        line,
        replace(line, kind="simulated", status="failed", reason="why"),
        replace(line, kind="simulated", size=8),
        replace(line, test="test_b", status="failed"),
        replace(line, test="test_b", kind="simulated", status="killed"),
        replace(line, test="test_c"),
        replace(line, test="test_c", kind="simulated", processor=1.0),
        replace(line, test="test_c", kind="threaded", status="skipped"),
    ]
    for each in lines:
        results.append(tmp_path / "lines", each)
    assert results.read(tmp_path / "lines") == lines
    assert results.differences(lines) == {"test_a on 4": "failed: why"}
    shown = results.table(lines).splitlines()
    assert [row.split() for row in shown[1:4]] == [
        ["simulated", "2", "1", "1", "0"],
        ["gloo", "2", "1", "0", "0"],
        ["threaded", "0", "0", "0", "1"],
    ]
    assert "1 that pass on both, simulated: 1.0 processor seconds" in shown[4]
    assert shown[-2:] == ["test_a on 4: failed: why", "    NOT KNOWN"]
