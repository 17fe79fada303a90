"""``fsdpcheck trace``, and the files that ``fsdpcheck simulate`` writes for it: what is printed, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.common.commands import run
from tests.common.dumps import dump, entry, write

_PROGRAM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in ((a, b) if rank else (b, a))]
for work in works:
    work.wait()
if sys.argv[1:] and rank:
    dist.barrier()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_PROGRAM)
    return tmp_path


def test_every_file_of_a_simulation_tells_of_its_hang(folder: Path) -> None:
    files = ("--trace", "trace.json", "--dumps", "dumps", "--json", "whole.json")
    code, simulated, _ = run(folder, "simulate", "-n", "2", *files, "train.py", "hang")
    assert code == 1
    assert sorted(path.name for path in (folder / "dumps").iterdir()) == [
        f"comm_lib_trace_rank_{rank}" for rank in range(2)
    ]
    report = simulated.split("\n  rank 1 at train.py")[0]
    for file in ("trace.json", "whole.json"):
        assert run(folder, "trace", "check", file)[:2] == (1, f"{report}\n")
    code, out, _ = run(folder, "trace", "check", "dumps", "--json", "found.json")
    assert code == 1
    assert "  missing: barrier() #1 on ranks [0, 1] (group '0') was never called by rank 0" in out
    assert "\x1b" not in out
    found = json.loads((folder / "found.json").read_text())
    assert (found["exit_code"], found["failure"]["kind"], found["world_size"], found["notes"]) == (1, "unsafe", 2, [])
    assert found["ranks"] == [
        {"rank": 0, "calls": 2, "state": "running"},
        {"rank": 1, "calls": 3, "state": "blocked"},
    ]
    assert "train.py:11" in found["failure"]["text"]


def test_orders_that_hang_devices_are_told_where_the_program_asks_for_nccl_or_the_user_does(folder: Path) -> None:
    code, out, _ = run(folder, "simulate", "-n", "2", "--dumps", "dumps", "train.py")
    assert code == 0, "gloo gets through"
    assert "unsafe: calls on several groups are issued in different orders" in out
    assert out.count("at train.py:7 comes before") == 2
    (folder / "gloo.py").write_text(_PROGRAM.replace("nccl", "gloo"))
    assert "unsafe" not in run(folder, "simulate", "-n", "2", "gloo.py")[1]
    code, out, _ = run(folder, "trace", "check", "dumps")
    assert (code, out.split(":")[0]) == (0, "nothing wrong")
    code, out, _ = run(folder, "trace", "check", "--in-order", "dumps")
    assert (code, out.count("at train.py:7 comes before")) == (1, 2)


def test_dumps_without_fault_are_code_0_and_notes_are_printed(folder: Path) -> None:
    write(folder / "dumps", {0: dump([entry("nccl:all_reduce", 1)], {"0": (0, 1)})})
    assert run(folder, "trace", "check", "dumps")[:2] == (
        0,
        "nothing wrong: the calls of rank 0, of 2 ranks, agree (1 in all), "
        "and no ranks wait for one another in a ring\n"
        "  note: there is no dump of rank 1: lost with its process, or left elsewhere; it is taken to have made each "
        "call that others made\n",
    )


def test_ranks_that_stand_in_a_call_with_one_that_left_no_dump_are_undecided_and_code_4(folder: Path) -> None:
    stuck = entry("nccl:all_reduce", 1, line=7, state="started", retired=False)
    write(folder / "dumps", {rank: dump([stuck], {"0": (0, 1, 2)}) for rank in (0, 2)})
    code, out, _ = run(folder, "trace", "check", "dumps", "--json", "found.json")
    told = (
        "ranks 0, 2 stood in all_reduce(float32[4]) #1 on ranks [0, 1, 2] at /home/user/train.py:7, "
        "and there is no dump of rank 1, which has part in it"
    )
    assert code == 4
    assert out.startswith(f"undecided: {told}\n  next: add the missing dumps; a rank without one has crashed, or was")
    found = json.loads((folder / "found.json").read_text())
    assert (found["exit_code"], found["failure"], found["undecided"]) == (4, None, [told])
    write(folder / "all", {rank: dump([stuck], {"0": (0, 1, 2)}) for rank in range(3)})
    assert run(folder, "trace", "check", "all")[0] == 0, "all that can be known is known"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("trace",), "the following arguments are required: {check,show}"),
        (("trace", "check"), "the following arguments are required: PATH"),
        (("trace", "check", "nowhere"), "there is no such file or folder\n  got     nowhere"),
        (("trace", "check", "train.py"), "train.py cannot be read\n  got     it holds no JSON"),
        (
            ("simulate", "-n", "2", "--trace", "no/where.json", "train.py"),
            "--trace names a place in a folder that is not",
        ),
        (
            ("trace", "check", "--json", "no/where.json", "train.py"),
            "--json names a place in a folder that is not there",
        ),
        (("trace", "show", "--width", "0", "train.py"), "'0': wanted a number of characters"),
        (("simulate", "-n", "2", "--dumps", ".", "train.py"), "--dumps wants a new or empty folder"),
        (("simulate", "-n", "2", "--dumps", "train.py", "train.py"), "--dumps wants a new or empty folder"),
    ],
)
def test_bad_input_is_told_and_is_code_2(command: tuple[str, ...], words: str, folder: Path) -> None:
    code, _, err = run(folder, *command)
    assert code == 2
    assert words in err
