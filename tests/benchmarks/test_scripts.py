"""Public scripts: the document has the results that were recorded, and what two runs print is compared as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("benchmarks.scripts", reason="only a checkout has the benchmarks")
from benchmarks import printed, script_runs, scripts  # noqa: E402

DOCUMENT = ROOT / "docs" / "scripts.md"
RECORDED = [json.loads(line) for line in scripts.RESULTS.read_text(encoding="utf-8").splitlines()]
LISTED = json.loads(scripts.LIST.read_text(encoding="utf-8"))["scripts"]


def test_the_document_has_the_results_of_all_scripts() -> None:
    assert [found["name"] for found in RECORDED] == [row["name"] for row in LISTED]
    *table, count = scripts.table()
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "\n".join(table) in text, "next: put the lines of benchmarks.scripts.table() into docs/scripts.md"
    assert count in text


def test_each_script_that_does_not_run_is_named_with_its_line_and_each_difference_with_its_reason() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    stopped, differing = text.split("\n## ")[1:3]
    for found in RECORDED:
        if found["simulated"]["outcome"] != "runs":
            assert f"| {found['name']} | `" in stopped, found["name"]
        elif any(found["differ"]):
            assert found["name"] in differing, found["name"]


def test_results_keep_no_folder_of_the_machine_that_ran_them() -> None:
    text = scripts.RESULTS.read_text(encoding="utf-8")
    assert not [folder for folder in ("/tmp", "/root", "/home", "/work") if folder in text]


def test_lines_are_compared_in_any_order_and_as_often_as_they_were_printed() -> None:
    one = "loss 0.5\n[12345] rank 0, 0x7f00\nTime: 0.1 ( 0.1)\nonce\nonce\n"
    other = "Time: 2.5 ( 0.9)\n[67890] rank 0, 0x7fff\n\nloss 0.25\nonce"
    assert printed.equal_lines(one, one) == (5, 5)
    assert printed.equal_lines(one, other) == (3, 5)
    assert printed.differing(one, other) == [["loss 0.5", "once"], ["loss 0.25"]]
    assert printed.error("at x.py:1\nRuntimeError: no\ncaused by ValueError: why") == "RuntimeError: no"


SAYS = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
tensor = torch.rand(2, device="cuda")
dist.all_reduce(tensor)
print(dist.get_rank(), tensor.tolist(), os.getcwd())
if FAILS:
    raise KeyError("as it is written")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("fails", [False, True])
def test_a_script_is_run_on_both_sides_and_they_are_compared(fails: bool, tmp_path: Path) -> None:
    (tmp_path / "one" / "tools").mkdir(parents=True)
    (tmp_path / "one" / "tools" / "says.py").write_text(SAYS.replace("FAILS", str(fails)))
    row = {
        "name": "says",
        "repository": "one",
        "ranks": 2,
        "folder": "tools",
        "cuda": True,
        "data": [],
        "python_path": [],
    }
    row["line"] = "torchrun --nproc-per-node 2 says.py"
    sides = script_runs.on_simulated_ranks(row, tmp_path), script_runs.in_processes(row, tmp_path)
    found = scripts._result(row, *sides)
    assert found["equal"] == ("the same error" if fails else "2 of 2"), sides
    assert found["simulated"]["outcome"] == found["real"]["outcome"] == ("code 1" if fails else "runs")
    assert all("script-" not in side.printed for side in sides)
