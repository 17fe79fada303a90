"""``fsdpcheck simulate``: what it reads, runs, prints and writes, and its exit codes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from multiprocessing import util
from pathlib import Path

import pytest

from fsdpcheck.compat import multiprocessing_private
from fsdpcheck.errors import UsageError
from fsdpcheck.simulation.programs import torchrun_line
from tests.common.commands import run

_SUM = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.full((2,), float(dist.get_rank()))
dist.all_reduce(tensor)
print(tensor.tolist(), sys.argv[1:], os.environ.get("GIVEN"))
"""
_HANGS = """
import torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    dist.barrier()  # nobody else comes
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_SUM)
    (tmp_path / "hangs.py").write_text(_HANGS)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", "-n", "2", "-n1", "--json", "x"),
        ("-n", "2", "train.py", "--", "-n1", "--json", "x"),
        ("--ranks=2", "-m", "train", "-n1", "--json", "x"),
        ("--torchrun", "torchrun --standalone --nproc-per-node 2 \\\n train.py -n1 --json x"),
        ("--torchrun", "python3 -m torch.distributed.run --nproc_per_node=1 -m train -n1 --json x", "-n", "2"),
    ],
)
def test_options_are_ours_before_the_script_and_right_after_it(command: tuple[str, ...], folder: Path) -> None:
    code, out, err = run(folder, "simulate", *command)
    assert code == 0, err
    wanted = [f"[rank {rank}] [1.0, 1.0] ['-n1', '--json', 'x'] None" for rank in range(2)]
    *printed, ending = out.splitlines()[:3]
    assert (sorted(printed), ending) == (wanted, "completed: 2 ranks; calls of all ranks: 2 all_reduce")
    assert sorted(path.name for path in folder.glob("*") if path.is_file()) == ["hangs.py", "train.py"]


def test_a_line_of_torchrun_says_nodes_and_variables_and_is_refused_where_it_says_no_number(folder: Path) -> None:
    script = folder / "train.py"
    launch = torchrun_line.read(f"torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d {script} --a b")
    assert (launch.ranks, launch.per_node, launch.script.argv[1:]) == (8, 4, ("--a", "b"))
    code, out, _ = run(folder, "simulate", "--torchrun", "GIVEN='a b' torchrun --nproc-per-node 1 train.py")
    assert (code, out.splitlines()[0]) == (0, "[rank 0] [0.0, 0.0] [] a b")
    for line, why in (
        (f"torchrun --nproc-per-node gpu {script}", "--nproc-per-node gpu says no number"),
        (f"python {script}", "takes a command line of torchrun"),
        ("torchrun --nproc-per-node 2 --unheard-of train.py", "no script '--unheard-of'|would not read"),
        ("torchrun 'open", "cannot be read"),
        ("torchrun --no-python --nproc-per-node 2 ls", "simulated ranks run Python"),
    ):
        with pytest.raises(UsageError, match=why):
            torchrun_line.read(line)


def test_a_hang_is_a_finding_with_the_lines_of_the_script_and_its_data(folder: Path) -> None:
    code, out, _ = run(folder, "simulate", "-n", "2", "--json", "found.json", "hangs.py")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "deadlock: no rank can move (W = 2)"
    assert "    >     5     dist.barrier()  # nobody else comes" in lines
    data = json.loads((folder / "found.json").read_text())
    assert (data["exit_code"], data["failure"]["kind"], data["world_size"]) == (1, "deadlock", 2)
    assert [len(rank["calls"]) for rank in data["ranks"]] == [1, 0]
    assert data["ranks"][0]["calls"][0]["op"] == "barrier"
    assert data["failure"]["ranks"][0]["where"] == "hangs.py:5"


_WANTS_A_GPU = """
import os
import torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
tensor = torch.ones(2, device="cuda")
dist.all_reduce(tensor)
print(tensor.tolist())
"""


def test_gpus_are_played_on_the_cpu_where_that_is_asked_for(folder: Path) -> None:
    (folder / "train.py").write_text(_WANTS_A_GPU)
    code, out, err = run(folder, "simulate", "train.py", "-n", "2", "--cuda-as-cpu", "--json", "told.json")
    assert code == 0, err
    assert "[rank 1] [2.0, 2.0]" in out
    wanted = {'init_process_group("nccl")': 2, "torch.cuda.set_device": 2, "torch.ones(device=)": 2}
    assert json.loads((folder / "told.json").read_text())["substitutions"] == wanted
    assert all(f"{name} {count}" in " ".join(out.split()) for name, count in wanted.items())
    code, out, _ = run(folder, "simulate", "train.py", "-n", "2")
    assert code == 2
    assert "the program wants a GPU, and there is none" in out
    assert "where   train.py:4" in out


def test_what_kills_the_process_of_the_ranks_is_a_finding_too(folder: Path) -> None:
    (folder / "dies.py").write_text("import ctypes, faulthandler\nfaulthandler.disable()\nctypes.string_at(0)\n")
    code, out, _ = run(folder, "simulate", "dies.py", "-n", "2", "--json", "found.json")
    assert code == 1
    assert "lost: the process of the ranks was killed by SIGSEGV" in out
    assert json.loads((folder / "found.json").read_text())["failure"]["kind"] == "lost"


def test_servers_and_daemons_that_ranks_started_end_with_them(folder: Path) -> None:
    """As at the end of a Python process; else they would hold on to stdout, and who reads it would wait for ever."""
    (folder / "serves.py").write_text(
        "import multiprocessing, time\nserver = multiprocessing.get_context('fork').Manager()\n"
        "daemon = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "daemon.start()\nprint('started', server._process.pid, daemon.pid)\n"
    )
    with (folder / "out").open("w") as out:  # a pipe would be theirs too
        command = [sys.executable, "-m", "fsdpcheck", "simulate", "serves.py", "-n", "2"]
        code = subprocess.run(command, cwd=folder, stdout=out, stderr=out, check=False).returncode
    started = [
        int(one) for line in re.findall(r"started (\d+ \d+)", (folder / "out").read_text()) for one in line.split()
    ]
    left = [number for number in started if Path(f"/proc/{number}").exists()]
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert (code, len(started), left) == (0, 4, [])


def test_processes_of_the_caller_are_left_alone(folder: Path) -> None:
    """The command may be called in a process that has children of its own, a session of tests say."""
    (folder / "silent.py").write_text("pass")
    own = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    own.start()
    ended: list[int] = []
    kept = util.Finalize(None, lambda: ended.append(os.write(writes, b"x")), exitpriority=1)
    reads, writes = os.pipe()
    try:
        assert run(folder, "simulate", "-n", "2", "silent.py")[0] == 0
        assert own.is_alive()
        os.set_blocking(reads, False)
        with pytest.raises(BlockingIOError):
            os.read(reads, 1)
    finally:
        kept.cancel()
        own.kill()
        own.join()


def test_a_child_that_fails_inside_ends_there_with_code_3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never goes on as a second copy of who called the command."""

    def fails() -> None:
        raise ValueError("inside")

    (folder / "silent.py").write_text("pass")
    monkeypatch.setattr(multiprocessing_private, "end_servers", fails)
    before = os.getpid()
    assert run(folder, "simulate", "-n", "2", "silent.py")[0] == 3
    assert os.getpid() == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("train.py",), "how many ranks?"),
        (("-n", "2"), "a script is missing"),
        (("-n", "2", "nowhere.py"), "there is no script 'nowhere.py'"),
        (("-n", "2", "-m", "nowhere"), "there is no module 'nowhere'"),
        (("-n", "2", "bad.py"), "bad.py:2\n    if x\n        ^"),
        (("-n", "3", "--per-node", "2", "train.py"), "ranks do not fill their nodes"),
        (("--torchrun", "torchrun train.py", "train.py"), "names the script already"),
        (("-n", "2", "--json", "no/where.json", "train.py"), "a folder that is not there"),
    ],
)
def test_bad_input_is_told_and_is_code_2(command: tuple[str, ...], words: str, folder: Path) -> None:
    (folder / "bad.py").write_text("x = 1\nif x\n    pass\n")
    code, _, err = run(folder, "simulate", *command)
    assert code == 2
    assert words in err


def test_a_rank_that_raises_is_told_with_its_line(folder: Path) -> None:
    (folder / "raises.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('of one rank')\n")
    code, out, _ = run(folder, "simulate", "raises.py", "-n", "2")
    assert code == 1
    assert "rank 1 raised ValueError" in out
    assert "    >     3     raise ValueError('of one rank')" in out


_FIRST_COME = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank():
    dist.send(torch.ones(1), 0)
else:
    first = dist.recv(torch.ones(1))
    dist.recv(torch.ones(1), 3 - first)
    assert first == 1
"""


def test_orders_are_drawn_until_one_fails_which_is_had_again_by_its_token(folder: Path) -> None:
    (folder / "first.py").write_text(_FIRST_COME)
    code, out, _ = run(folder, "simulate", "-n", "3", "first.py")
    assert code == 0
    assert out.endswith("another may end otherwise: a message was received from any source\n")
    code, out, _ = run(folder, "simulate", "-n", "3", "--schedules", "50", "--json", "found.json", "first.py")
    assert code == 1
    assert "  decided  rank 0: receive from any source, tag 0 #0 from rank 2, at " in out
    data = json.loads((folder / "found.json").read_text())
    assert data["order"] == ["rank 0: receive from any source, tag 0 #0 from rank 2"]
    token = out.split("--order ")[1].split()[0]
    code, out, _ = run(folder, "simulate", "-n", "3", "--order", token, "first.py")
    assert (code, out.startswith("rank 0 raised AssertionError")) == (1, True)
    for wrong, words in (((token[:-6],), "this is no order of ranks"), ((token, "--schedules", "2"), "leave one out")):
        code, _, err = run(folder, "simulate", "-n", "3", "--order", *wrong, "first.py")
        assert (code, words in err) == (2, True)


def test_a_token_survives_edits_that_leave_what_it_decides_and_is_refused_after_others(folder: Path) -> None:
    (folder / "first.py").write_text(_FIRST_COME)
    _, out, _ = run(folder, "simulate", "-n", "3", "--schedules", "50", "first.py")
    token = out.split("--order ")[1].split()[0]
    edited = (
        _FIRST_COME.replace("first", "earliest")
        .replace("\nif dist", "\n\n\nimport threading\nlogs = []\nif dist", 1)
        .replace(
            "if dist",
            "own = dist.new_group([0, 1, 2])\ndist.all_reduce(torch.ones(1), group=own)\n"
            "threading.Thread(target=logs.append, args=('began',)).start()\nif dist",
            1,
        )
    )
    assert edited.count("\n") > _FIRST_COME.count("\n") + 5
    (folder / "edited.py").write_text(edited)
    code, out, _ = run(folder, "simulate", "-n", "3", "--order", token, "edited.py")
    assert (code, out.startswith("rank 0 raised AssertionError")) == (1, True), out
    (folder / "other.py").write_text(
        _FIRST_COME.replace("torch.ones(1), 0)", "torch.ones(1), 0, tag=4)")
        .replace("dist.recv(torch.ones(1))", "dist.recv(torch.ones(1), tag=4)")
        .replace("3 - first)", "3 - first, tag=4)")
    )
    code, _, err = run(folder, "simulate", "-n", "3", "--order", token, "other.py")
    assert code == 2
    assert "the program no longer comes to a decision of this order, and ends well" in err
    assert "got     no 'rank 0: receive from any source, tag 0 #0 from rank 2'" in err
    broken = (folder / "other.py").read_text() + "raise SystemExit(3)\n"
    (folder / "broken.py").write_text(broken)
    code, out, _ = run(folder, "simulate", "-n", "3", "--order", token, "broken.py")
    assert code == 1
    assert "a decision of the order did not come up: rank 0: receive from any source, tag 0 #0 from rank 2" in out


def test_an_order_that_is_the_only_one_is_run_once(folder: Path) -> None:
    code, out, _ = run(folder, "simulate", "-n", "2", "--schedules", "50", "train.py")
    assert (code, out.splitlines()[-1]) == (0, "  one order of ranks was run")


_IN_ORDER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank():
    dist.send(torch.ones(1), 0)
else:
    came = [dist.recv(torch.ones(1)) for _ in range(dist.get_world_size() - 1)]
    assert came == sorted(came)
"""


@pytest.mark.nightly
def test_a_failure_is_had_again_in_the_smallest_world_that_has_it(folder: Path) -> None:
    (folder / "first.py").write_text(_IN_ORDER)
    shrink = ("--shrink", "--schedules", "60", "--json", "found.json")
    code, out, _ = run(folder, "simulate", "-n", "5", *shrink, "first.py")
    assert code == 1
    assert "\nfound at W = 5; the smallest world that fails alike: W = 3\n" in out
    told = json.loads((folder / "found.json").read_text())
    assert (told["world_size"], told["smaller"]["world_size"], told["worlds_tried"]) == (5, 3, [1, 2, 3])
    assert told["smaller"]["failure"]["kind"] == told["failure"]["kind"] == "raised"
    token = out.split("  again   with -n 3 and --order ")[1].split()[0]
    code, out, _ = run(folder, "simulate", "-n", "3", "--order", token, "first.py")
    assert (code, out.startswith("rank 0 raised AssertionError")) == (1, True)
    code, out, _ = run(folder, "simulate", "-n", "2", "--shrink", "hangs.py")
    assert code == 1
    assert out.endswith("\n  no smaller world fails alike: W = 1 tried\n")
