"""``fsdpcheck simulate`` with programs that do what no rank should: each is told by name, and none hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.common.commands import run

_GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"

PROGRAMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "never communicates": ("print('alone')", 0, ("[rank 1] alone", "completed: 2 ranks; no rank communicated")),
    "forks": (
        "import os\nchild = os.fork()\nif not child: os._exit(3)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
        0,
        ("[rank 0] 3", "[rank 1] 3", "completed: 2 ranks"),
    ),
    "forks a child that communicates": (
        _GROUP + "import os\nif not os.fork():\n    dist.barrier()\n    os._exit(0)\nos.wait()",
        2,
        ("a process that a rank has forked uses torch.distributed", "torch.multiprocessing.spawn(..., nprocs=W)"),
    ),
    "starts its ranks as processes": (
        "import multiprocessing, torch.distributed as dist\n"
        "def work(rank): dist.init_process_group('gloo', 'tcp://127.0.0.1:1', rank=rank, world_size=2)\n"
        "children = [multiprocessing.get_context('fork').Process(target=work, args=(r,)) for r in range(2)]\n"
        "[child.start() for child in children]\n[child.join() for child in children]",
        2,
        ("a process that a rank has forked uses torch.distributed",),
    ),
    "spawns its ranks": (
        "import torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank, size):\n"
        "    dist.init_process_group('gloo', 'tcp://127.0.0.1:1', rank=rank, world_size=size)\n"
        "    print('of', size)\n"
        "mp.spawn(work, (2,), nprocs=2)\n"
        "assert mp.start_processes(work, (2,), nprocs=2, join=False, start_method='fork').join()",
        0,
        ("[rank 0] of 2", "[rank 1] of 2"),
    ),
    "wants a GPU": ("import torch\ntorch.ones(2).cuda()", 2, ("wants a GPU", "where   program.py:2", "--cuda-as-cpu")),
    "asks": ("input('who? ')", 2, ("a rank reads from stdin", "got     rank 0 waits for input")),
    "reads the descriptor": ("import os\nos.read(0, 1)", 1, ("OSError: [Errno 9] Bad file descriptor", "program.py:2")),
    "leaves a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        0,
        ("leak: every rank left a thread (Event.wait, started at program.py:2) running, and a process does not end",),
    ),
    "does not fit its mesh": (
        "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2, 2))",
        1,
        ("Mesh should not be bigger than default world size 2, but found 4 ranks", "at program.py:2"),
    ),
    "goes elsewhere": (
        _GROUP + "import os\nos.chdir('/')\ndist.barrier()\nraise ValueError(os.getcwd())",
        1,
        ("ranks 0, 1 raised ValueError", "    >     6 raise ValueError(os.getcwd())"),
    ),
    "stays elsewhere": (_GROUP + "import os\nos.chdir('/')\ndist.barrier()", 0, ("left os.getcwd() at / (was ",)),
    "one leaves": (
        _GROUP + "import sys\nif dist.get_rank(): sys.exit('enough')\ndist.barrier()",
        1,
        ("[rank 1] enough", "rank 1 left with exit code 1", "barrier() #0 on ranks [0, 1] was never called by rank 1"),
    ),
    "does not know its arguments": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--steps'])",
        2,
        ("every rank left with exit code 2 before it met another", "unrecognized arguments: --steps"),
    ),
    "gives up at once": ("raise SystemExit(3)", 1, ("every rank left with exit code 3 before it met another",)),
    "one leaves by os._exit": (
        _GROUP + "import os\nif dist.get_rank(): os._exit(5)\ndist.barrier()",
        1,
        ("rank 1 left with exit code 5", "    >     5 dist.barrier()"),
    ),
    "one kills itself": (
        _GROUP + "import os\nif dist.get_rank(): os.kill(os.getpid(), 9)\ndist.barrier()",
        1,
        ("rank 1 was lost: killed by SIGKILL", "was never called by rank 1 (0 calls on this group; lost)"),
    ),
    "stops itself": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        2,
        ("a simulated rank cannot be stopped by SIGSTOP",),
    ),
    "handles a signal": (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda number, frame: print('got', number, frame.f_lineno))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nsignal.raise_signal(signal.SIGUSR1)",
        0,
        ("[rank 0] got 10 3", "[rank 0] got 10 4", "[rank 1] got 10 3"),
    ),
    "cannot say what is wrong": (
        "class Mute(Exception):\n    def __str__(self): raise RuntimeError\n    __repr__ = __str__\nraise Mute(1)",
        1,
        ("raised Mute: <exception str() failed>, at program.py:4",),
    ),
    "replaces stdout": (
        "import io, sys\nsys.stdout = io.StringIO()\nprint('mine')\nsys.stderr.write(sys.stdout.getvalue())",
        0,
        ("[rank 0] mine", "[rank 1] mine", "completed: 2 ranks"),
    ),
    "closes stdout": ("import os\nos.close(1)\nos.close(2)", 1, ("rank 1: raised OSError: [Errno 9]", "program.py:2")),
}
"""By what it does: the program, the exit code, and words of what is printed."""


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_is_told_by_name_what_it_cannot_do(what: str, tmp_path: Path) -> None:
    source, wanted, words = PROGRAMS[what]
    (tmp_path / "program.py").write_text(source + "\n")
    code, out, err = run(tmp_path, "simulate", "-n", "2", "program.py")
    assert code == wanted, out + err
    for word in words:
        assert word in out + err


def test_what_is_no_script_is_told_and_is_code_2(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "latin.py").write_bytes("name = 'café'\n".encode("latin-1"))
    (tmp_path / "nothing.py").write_bytes(b"x = 1\n\0\n")
    for arguments, words in {
        ("-n", "2", "folder.py"): ("there is no script 'folder.py'", "Is a directory"),
        ("-n", "2", "latin.py"): ("the script has a syntax error", "utf-8", "latin.py"),
        ("-n", "2", "nothing.py"): ("null bytes", "nothing.py"),
        ("-n", "0", "nothing.py"): ("'0': wanted a number of ranks above 0",),
        ("-n", "-3", "nothing.py"): ("-n",),
        ("-n", "many", "nothing.py"): ("'many': wanted a number of ranks above 0",),
    }.items():
        code, out, err = run(tmp_path, "simulate", *arguments)
        assert (code, out) == (2, ""), arguments
        for word in words:
            assert word in err, arguments


def test_no_more_ranks_than_there_can_be(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('here')\n")
    code, out, err = run(tmp_path, "simulate", "-n", "100000", "program.py")
    assert (code, out) == (2, "")
    assert "got     100000" in err
    assert "wanted  1 to 256" in err


@pytest.mark.nightly
def test_much_that_is_printed_is_printed_whole(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("for _ in range(50): print('x' * 999_999)\n")
    code, out, _ = run(tmp_path, "simulate", "-n", "1", "program.py", "--json", "found.json")
    assert code == 0
    assert sum(line == "[rank 0] " + "x" * 999_999 for line in out.splitlines()) == 50
    assert json.loads((tmp_path / "found.json").read_text())["exit_code"] == 0
