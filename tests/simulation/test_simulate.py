"""Any program on simulated ranks: what it returns and prints, what ranks have apart, and how it ends."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fsdpcheck
from fsdpcheck import simulate
from fsdpcheck.errors import UsageError
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.simulate import Options, Simulation, simulate_script


def _sum_of_ranks(first: int = 0) -> list[float]:
    dist.init_process_group("nccl")
    tensor = torch.full((2,), float(first + dist.get_rank()))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


def _run(folder: Path, source: str, size: int = 2, *arguments: str, **files: str) -> Simulation:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "program.py").write_text(source)
    return simulate_script(script.of_file(folder / "program.py", arguments), size, Options(show=False))


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_function_makes_its_own_group_and_returns(size: int) -> None:
    done = simulate(_sum_of_ranks, size, [1]).check()
    assert done.returned == ([float(sum(range(1, size + 1)))] * 2,) * size
    assert [len(trace) for trace in done.traces] == [1] * size
    assert done.voids == ()


def test_the_environment_is_that_of_torchrun() -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    before = dict(os.environ)
    done = simulate(lambda: (*map(os.environ.get, names), dist.is_torchelastic_launched()), 4, per_node=2)
    assert done.returned[3] == ("3", "1", "1", "4", "2", "2", "127.0.0.1", True)
    assert dict(os.environ) == before


def test_generators_that_nobody_has_seeded_differ_between_ranks_and_repeat() -> None:
    def draws() -> tuple[float, float, float, float]:
        first = torch.rand(1).item(), random.random(), float(numpy.random.rand())
        torch.manual_seed(1)
        return (*first, torch.rand(1).item())

    one, other = simulate(draws, 2), simulate(draws, 2)
    assert one.returned == other.returned
    mine, theirs = one.returned
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [False, False, False, True]


def test_what_a_rank_prints_is_known_and_shown_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    def prints() -> None:
        print("one", end=" ")
        dist.init_process_group("gloo")
        dist.barrier()
        print("two")
        print("three", end="", file=sys.stderr)

    done = simulate(prints, 2)
    assert done.printed == ("one two\nthree",) * 2
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[rank 0] one two", "[rank 1] one two"]
    assert shown.err.splitlines() == ["[rank 0] three", "[rank 1] three"]
    simulate(prints, 2, show=False)
    assert capsys.readouterr() == ("", "")


def test_a_hang_is_told_with_both_sides_and_check_raises() -> None:
    def hangs() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            dist.barrier()

    done = simulate(hangs, 2)
    assert done.failure is not None
    assert done.failure.kind == "deadlock"
    with pytest.raises(fsdpcheck.SimulationFailed, match=r"barrier.* was never called by rank 0"):
        done.check()


def test_what_a_rank_does_to_its_process_is_its_own() -> None:
    def does() -> object:
        rank = int(os.environ["RANK"])
        atexit.register(print, "first registered")
        atexit.register(print, "registered last")
        atexit.register(forgotten)
        atexit.unregister(forgotten)
        assert threading.main_thread() is threading.current_thread()
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else signal.default_int_handler)
        os.chdir("/" if rank else os.path.dirname(__file__))
        dist.init_process_group("gloo")
        dist.barrier()
        return before, signal.getsignal(signal.SIGTERM), os.getcwd()

    def forgotten() -> None:
        raise AssertionError

    outside = signal.getsignal(signal.SIGTERM), os.getcwd()
    done = simulate(does, 2, show=False).check()
    assert done.printed == ("registered last\nfirst registered\n",) * 2
    here = os.path.dirname(__file__)
    assert done.returned[0] == (signal.SIG_DFL, signal.default_int_handler, here)
    assert done.returned[1] == (signal.SIG_DFL, signal.SIG_IGN, "/")
    assert (signal.getsignal(signal.SIGTERM), os.getcwd()) == outside


@pytest.mark.parametrize(
    ("code", "kind"), [("", None), ("None", None), ("0", None), ("3", "exited"), ("'a message'", "exited")]
)
def test_a_script_may_end_by_sys_exit(code: str, kind: str | None, tmp_path: Path) -> None:
    done = _run(tmp_path, f"import sys\nsys.exit({code})")
    assert (done.failure and done.failure.kind) == kind


def test_a_script_has_its_name_words_folder_and_modules_of_its_own(tmp_path: Path) -> None:
    source = """
import pickle, sys
import torch.distributed as dist
import beside
from package import inner

class Own:
    pass

if __name__ == "__main__":
    dist.init_process_group("gloo")
    beside.SEEN.append(dist.get_rank())
    inner.SEEN.append(dist.get_rank())
    dist.barrier()
    assert sys.modules["__main__"].Own is Own and type(pickle.loads(pickle.dumps(Own()))) is Own
    got = [None, None]
    dist.all_gather_object(got, beside.Thing())
    assert all(type(thing) is beside.Thing for thing in got)
    print(beside.SEEN, inner.SEEN, beside.AT_IMPORT, sys.argv[1:], sys.path[0])
"""
    beside = "import os\nSEEN = []\nAT_IMPORT = os.environ['RANK']\nclass Thing: pass\n"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("SEEN = []\n")
    done = _run(tmp_path, source, 2, "--steps", "2", beside=beside).check()
    assert done.printed == tuple(f"[{r}] [{r}] {r} ['--steps', '2'] {tmp_path}\n" for r in range(2))
    assert "beside" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_modules_that_communicate_while_they_are_imported_stop_nobody(tmp_path: Path) -> None:
    beside = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nDONE = True\n"
    done = _run(tmp_path, "import beside\nprint(beside.DONE)", 3, beside=beside).check()
    assert done.printed == ("True\n",) * 3


def test_a_function_that_is_spawned_runs_on_the_rank_of_its_number(tmp_path: Path) -> None:
    source = """
import sys
import torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=rank, world_size=size)
    print(rank, dist.get_rank())

if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]), join=True)
"""
    assert _run(tmp_path, source, 2, "2").check().printed == ("0 0\n", "1 1\n")
    refused = _run(tmp_path, source, 2, "3").failure
    assert refused is not None
    assert refused.kind == "adapter"
    assert "simulate it on 3 ranks" in refused.text
    assert mp.spawn.__module__ == "torch.multiprocessing.spawn"


def test_each_rank_has_its_own_handlers_and_levels_of_loggers(tmp_path: Path) -> None:
    """Each adds a handler, and rank 0 alone asks for more; else each would say what the others log, and twice."""
    source = """
import logging, os, sys
import torch.distributed as dist
logger, rank = logging.getLogger("of.all"), int(os.environ["RANK"])
dist.init_process_group("gloo")
for where in (logging.root, logger):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{rank} {where.name} %(message)s"))
    where.addHandler(handler)
    dist.barrier()
logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
dist.barrier()
logger.info("told")
dist.barrier()
logger.error("wrong")
print(len(logging.root.handlers) - int(sys.argv[1]))
"""
    before = list(logging.root.handlers), logging.getLogger("of.all").level
    printed = _run(tmp_path, source, 2, str(len(logging.root.handlers))).check().printed
    assert printed[0] == "0 of.all told\n0 root told\n0 of.all wrong\n0 root wrong\n1\n"
    assert printed[1] == "1 of.all wrong\n1 root wrong\n1\n"
    assert (logging.root.handlers, logging.getLogger("of.all").level) == before
    assert not logging.getLogger("of.all").handlers


STARTS = """
import random, sys
import torch, torch.distributed as dist
from torch.multiprocessing import get_context

def work(rank, size, *rest):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[0]}.meet", rank=rank, world_size=size)
    drawn = torch.tensor([torch.rand(1).item(), random.random()])
    least, most = drawn.clone(), drawn.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    print(dist.get_rank(), (least == most).tolist())
    sys.exit()

if __name__ == "__main__":
    context, size = get_context(sys.argv[1]), 2
    given = [context.Queue()] if sys.argv[2:] == ["queue"] else []
    if sys.argv[2:] == ["seeded"]:
        torch.manual_seed(3)
    started = [context.Process(target=work, args=(rank, size, *given)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    print([process.exitcode for process in started], started[0].is_alive())
"""
"""A program that starts its ranks itself, and prints on each which of what torch and Python draw is equal on all."""


@pytest.mark.parametrize(
    ("words", "equal"),
    [
        (("fork",), "[True, True]"),
        (("spawn",), "[False, False]"),
        (("fork", "seeded"), "[True, True]"),
        (("spawn", "seeded"), "[False, False]"),
    ],
)
def test_a_process_that_is_given_its_rank_is_that_rank(words: tuple[str, ...], equal: str, tmp_path: Path) -> None:
    """A forked child has the generators of its parent, seeded or not; a new process has its own."""
    printed = _run(tmp_path, STARTS, 2, *words).check().printed
    assert printed == tuple(f"{rank} {equal}\n[0, 0] False\n" for rank in range(2))


def test_a_process_that_shares_a_queue_with_its_rank_is_refused(tmp_path: Path) -> None:
    failure = _run(tmp_path, STARTS, 2, "fork", "queue").failure
    assert failure is not None
    assert "simulated ranks do not share what a program makes before it starts them" in failure.text
    assert "Queue of multiprocessing" in failure.text


def test_processes_that_are_too_few_to_be_the_ranks_are_refused(tmp_path: Path) -> None:
    """Two children on three ranks: none of them is a rank, and they would meet beside the simulation."""
    failure = _run(tmp_path, STARTS, 3, "fork").failure
    assert failure is not None
    assert "a process that a rank has forked uses torch.distributed" in failure.text


@pytest.mark.parametrize("asks", ["input()", "import sys; sys.stdin.read()"])
def test_a_script_that_asks_somebody_is_refused_by_name(asks: str, tmp_path: Path) -> None:
    failure = _run(tmp_path, asks).failure
    assert failure is not None
    assert failure.kind == "adapter"
    assert "a rank reads from stdin" in failure.text


def test_a_forked_child_of_a_rank_ends_where_its_program_does(tmp_path: Path) -> None:
    source = """
import os, sys
child = os.fork()
if child == 0:
    if sys.argv[1] == "raises":
        raise RuntimeError("in the child")
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert _run(tmp_path, source, 2, "leaves").check().printed == ("7\n",) * 2
    assert _run(tmp_path, source, 1, "raises").check().printed == ("1\n",)


def test_settings_that_ranks_leave_are_told_and_put_back() -> None:
    done = simulate(lambda: torch.set_default_dtype(torch.float64), 2)
    assert torch.get_default_dtype() is torch.float32
    assert any("default_dtype" in sentence for sentence in done.left)


def test_worlds_that_are_none_are_refused() -> None:
    for size in (0, -1, 10**6):
        with pytest.raises(UsageError, match="no number of ranks"):
            simulate(_sum_of_ranks, size)
    with pytest.raises(UsageError, match="do not fill their nodes"):
        simulate(_sum_of_ranks, 3, per_node=2)
    inside = simulate(lambda: simulate(_sum_of_ranks, 2), 1)
    assert inside.failure is not None
    assert "cannot start another" in inside.failure.text


def test_numbers_of_processes_are_apart_for_programs_and_one_for_python() -> None:
    def numbers() -> tuple[int, int, int]:
        dist.init_process_group("gloo")
        before = os.getpid()
        dist.barrier()
        return before, os.getpid(), multiprocessing.current_process().ident or 0

    one, other = simulate(numbers, 2).check().returned
    assert one[0] == one[1] != other[0] == other[1]
    assert {one[0], other[0]}.isdisjoint({os.getpid()})
    assert one[2] == other[2] == os.getpid()


def test_a_rank_that_sleeps_until_a_file_is_there_lets_the_others_run(tmp_path: Path) -> None:
    def polls() -> str:
        dist.init_process_group("gloo")
        file, rank = tmp_path / "made", dist.get_rank()
        if rank == 1:
            file.write_text("by rank 1")
        while not file.exists():
            time.sleep(0)
        dist.barrier()
        return file.read_text()

    done = simulate(polls, 2, budget=20).check()
    assert done.returned == ("by rank 1",) * 2
    assert done.voids == (
        "a rank slept, as one does that polls",
        "ranks used a file in an order that nothing fixes: made",
    )


def test_functions_of_a_script_have_code_of_each_ranks_own(tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        'import torch.distributed as dist\ndist.init_process_group("gloo")\ndef step(): pass\n'
        "print(id(step.__code__))\ndist.barrier()",
    ).check()
    assert len(set(done.printed)) == 2


@pytest.mark.nightly
def test_each_rank_of_a_script_compiles_for_itself(tmp_path: Path) -> None:
    source = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
@torch.compile(backend="eager")
def doubled(x):
    print("not compiled")
    return x * 2
print(doubled(torch.ones(1) * dist.get_rank()).item())
"""
    assert [text.split()[-1] for text in _run(tmp_path, source).check().printed] == ["0.0", "2.0"]
