"""The fixture ``world``: values by rank, findings as failures, on simulated ranks and on real ones."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdpcheck.engines._common import metal
from fsdpcheck.engines._real import gloo_ranks
from fsdpcheck.engines._real.forks import Said
from fsdpcheck.engines._real.hangs import Watch
from fsdpcheck.errors import UsageError
from fsdpcheck.execution.deadlock import Raised
from fsdpcheck.pytest_plugin.world import KINDS, Kind, SharedByRanks, World, of_session
from tests.common.commands import run, run_pytest

HERE = [kind for kind in KINDS if not metal.of(kind).lacks(2)]

SESSION = """
import os, sys
import pytest, torch
import torch.distributed as dist


def step(factor, *, plus=0):
    dist.init_process_group("gloo")
    tensor = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    print("summed")
    return dist.get_rank(), tensor * factor + plus


@pytest.mark.parametrize("size", [1, 3])
def test_passes(world, size, capsys):
    got = world.run(step, size, 2, plus=1)
    assert [rank for rank, _ in got] == list(range(size))
    assert all(tensor.tolist() == [2 * sum(range(size)) + 1] * 2 for _, tensor in got)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {rank}] summed" for rank in range(size)]


def test_closure(world):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert world.run(lambda: [os.environ[name] for name in names], 2) == [[r, r, "2", "2"] for r in "01"]


def test_raises(world):
    def program():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("of one rank")
        dist.barrier()

    world.run(program, 3)


def test_disagrees(world):
    def program():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2), dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)

    world.run(program, 2)
"""
"""Of what ``test_disagrees`` calls gloo lets some pass, by chance; it fails on any ranks."""


@pytest.fixture
def folder(place: pytest.Pytester) -> Path:
    place.makepyfile(test_step=SESSION)
    place.makeini(
        "[pytest]\nfilterwarnings =\n  error\n  ignore:Module already imported:pytest.PytestAssertRewriteWarning\n"
    )
    return place.path


def _pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    code, out, err = run_pytest(folder, ["-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", *arguments])
    return code, out + err


@pytest.mark.parametrize("parallel", [("-p", "no:xdist"), pytest.param(("-n", "2"), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["simulated", pytest.param("processes", marks=pytest.mark.nightly)])
def test_a_session_on_the_ranks_that_it_asks_for(folder: Path, kind: Kind, parallel: tuple[str, ...]) -> None:
    code, out = _pytest(folder, "--fsdpcheck-world", kind, *parallel)
    assert code == 1
    failed = set(re.findall(r"^FAILED test_step.py::(\w+) - ", out, re.MULTILINE))
    assert failed == {"test_raises", "test_disagrees"}
    assert "mismatch: call #0 on ranks [0, 1] differs between its members in reduce op" in out
    line = (folder / "test_step.py").read_text().splitlines().index('            raise ValueError("of one rank")') + 1
    assert "\nrank 1 raised ValueError\n" in out
    assert f"  rank 1: raised ValueError: of one rank, at {folder}/test_step.py:{line}\n" in out
    assert f'    > {line:5}             raise ValueError("of one rank")\n' in out
    ranks = {"simulated": "3 simulated ranks", "processes": "3 real ranks, forked, on gloo"}[kind]
    assert f"\n  run     program on {ranks}, at {folder}/test_step.py:{line + 3}\n" in out


def test_calls_that_disagree_are_told_where_gloo_let_them_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks while ranks are in the call."""
    monkeypatch.setattr(Watch, "look", lambda self: False)

    def program(agree: bool) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if agree or dist.get_rank() else dist.ReduceOp.SUM)

    assert gloo_ranks.run(program, 2, [True], seconds=60).failure is None
    failure = gloo_ranks.run(program, 2, [False], seconds=60).failure
    assert failure is not None
    assert (failure.kind, "differs between its members in reduce op" in failure.text) == ("mismatch", True)


@pytest.mark.nightly
def test_the_configuration_file_says_which_ranks_and_the_command_line_comes_first(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfsdpcheck_world = processes\n")
    arguments = ("-p", "no:cacheprovider")
    asked = (arguments, (*arguments, "--fsdpcheck-world", "simulated"))
    assert [of_session(pytester.parseconfigure(*words)).kind for words in asked] == ["processes", "simulated"]


@pytest.mark.parametrize(
    ("ini", "said"),
    [
        (
            "fsdpcheck_world = threads",
            f"there are no such ranks\n*got     threads\n*wanted  {', '.join(KINDS)}",
        ),
        ("fsdpcheck_world_timeout = soon", "fsdpcheck_world_timeout is no time"),
        ("fsdpcheck_world_timeout = -1", "fsdpcheck_world_timeout is no time"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(pytester: pytest.Pytester, ini: str, said: str) -> None:
    pytester.makeini(f"[pytest]\n{ini}\n")
    with pytest.raises(pytest.UsageError, match=said.replace("*", " +")):
        pytester.parseconfigure("-p", "no:cacheprovider")


def of(kind: Kind) -> World:
    return World(kind, seconds=60)


def _joined() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def hangs() -> None:
    if _joined() == 0:
        dist.barrier()


def test_a_hang_is_told_as_the_command_tells_it(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\ndist.get_rank() or dist.barrier()\n"
    )
    told = run(tmp_path, "simulate", "-n", "2", str(script))[1]
    program = compile(script.read_text(), str(script), "exec")
    world = of("simulated")
    with pytest.raises(pytest.fail.Exception) as failed:
        world.run(lambda: exec(program, {}), 2)
    text, _, call = str(failed.value).rpartition("\n")
    text, callers = re.subn(rf", called at {re.escape(__file__)}:\d+", "", text)  # the lambda, which the script has not
    assert (text, callers) == (told.rstrip(), 1)
    assert call.startswith("  run     <lambda> on 2 simulated ranks, at ")
    assert world.simulation.failure is not None
    assert (world.simulation.failure.kind, len(world.simulation.traces[0])) == ("deadlock", 1)


def gives_up() -> None:
    tensor = torch.ones(1)
    if _joined() == 0:
        work = dist.irecv(tensor, 1)
        assert work is not None
        work.wait(dist.distributed_c10d.timedelta(milliseconds=20))
    dist.recv(tensor, 0)


def test_who_gives_up_on_real_ranks_is_no_progress_and_never_called_a_deadlock() -> None:
    """Rank 0 does not wait for ever, so nothing proves that it cannot move."""
    with pytest.raises(pytest.fail.Exception) as failed:
        of("processes").run(gives_up, 2)
    head, *lines = str(failed.value).splitlines()
    assert head == "no progress: rank 0 gave up; gloo waits 60 s unless the program says otherwise"
    assert "  next    run it on simulated ranks: they prove who waits for whom, and wait for no clock" in lines
    assert any(
        re.search(r"rank 0: raised RuntimeError: .*Timed out waiting 20ms.*, at .*test_world.py", s) for s in lines
    )
    assert "deadlock" not in str(failed.value)


def peer_is_gone() -> None:
    if _joined() == 0:
        dist.recv(torch.ones(1), 1)


def crosses_messages() -> None:
    dist.recv(torch.ones(1), 1 - _joined())


def crosses_groups() -> None:
    rank, groups = _joined(), [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(1), group=group)


def makes_no_group() -> None:
    if _joined() == 0:
        dist.new_group([0, 1])


def never_joins() -> None:
    if os.environ["RANK"] == "0":
        _joined()


@pytest.mark.parametrize(
    ("program", "waits"),
    [
        (hangs, r"rank 0: in barrier\(\) #0 on ranks \[0, 1\], waiting for rank 1, at .*test_world\.py:\d+"),
        (crosses_messages, r"rank 1: in recv\(float32\[1\]\) #0 from rank 0 to rank 1, tag 0, waiting for rank 0"),
        (peer_is_gone, r"rank 1: finished\n  missing: recv\(.* was never sent by rank 1 \(0 sent .*; finished\)"),
        (crosses_groups, "  ring: rank 0 waits for rank 1 waits for rank 0"),
        (makes_no_group, r"rank 0: in new_group\(\) #0 on ranks \[0, 1\], waiting for rank 1"),
        (never_joins, r"rank 0: in new_group\(\) #0 on ranks \[0, 1\], waiting for rank 1"),
    ],
)
def test_a_hang_of_real_ranks_is_proved_and_waits_for_no_clock(program: object, waits: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        World("processes", seconds=1e6).run(program, 2)  # type: ignore[arg-type]
    assert str(failed.value).startswith("deadlock: no rank can move (W = 2)\n")
    assert re.search(waits, str(failed.value)), failed.value


def asks_about_its_group() -> tuple[object, ...]:
    _joined()
    group = dist.new_group([0, 1], backend="gloo")
    assert group is not None
    return dist.get_backend(), dist.get_backend(group), dist.get_world_size(group), dist.get_process_group_ranks(group)


def test_groups_that_publish_are_known_by_the_name_of_gloo() -> None:
    assert of("processes").run(asks_about_its_group, 2) == [("gloo", "gloo", 2, [0, 1])] * 2


def is_killed() -> None:
    if _joined() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def leaves() -> None:
    if _joined() == 1:
        os._exit(0)
    dist.barrier()


def returns_a_lambda() -> object:
    return (lambda: None) if os.environ["RANK"] == "1" else None


def used_a_gpu_before() -> None:
    if _joined() == 0:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")


@pytest.mark.parametrize(
    ("program", "head", "besides"),
    [
        (used_a_gpu_before, "rank 0 raised RuntimeError", "next    hide the GPUs from this process"),
        (is_killed, "rank 1 was lost: killed by SIGKILL", ""),
        (leaves, "rank 1 left with exit code 0 in the middle of a run", ""),
        (returns_a_lambda, "what rank 1 returned cannot be sent from its process", "an object of builtins.function"),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(program: object, head: str, besides: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        of("processes").run(program, 2)  # type: ignore[arg-type]
    assert str(failed.value).splitlines()[0] == head
    assert besides in str(failed.value)


def stands_still() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("at once")
    threading.Event().wait()


@pytest.mark.nightly
def test_ranks_that_were_ended_are_told_with_the_lines_they_stood_at() -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        of("processes").run(stands_still, 3)
    assert "  ended: ranks 1, 2, which had not come to an end by then" in str(failed.value).splitlines()
    assert re.search(r"  ranks 1, 2: running, at .*test_world\.py:\d+", str(failed.value))


def _drawn() -> tuple[object, ...]:
    rank = _joined()
    parts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, torch.rand(1).item())
    return rank, tuple(parts)


def test_both_kinds_of_ranks_return_the_same_and_draw_the_same_numbers_each_its_own() -> None:
    world = of("simulated")
    simulated, real = (world.on(kind).run(_drawn, 2) for kind in ("simulated", "processes"))
    assert simulated == real
    assert len(set(simulated[0][1])) == 2
    with pytest.raises(UsageError, match="nothing was simulated"):
        _ = world.on("processes").simulation


def test_what_simulated_ranks_wrote_to_though_they_share_it_is_a_warning() -> None:
    seen: list[str] = []

    def program() -> None:
        seen.append(os.environ["RANK"])

    with pytest.warns(SharedByRanks, match="ranks share seen"):
        of("simulated").run(program, 2)


@pytest.mark.parametrize("kind", HERE)
def test_a_number_of_ranks_that_is_none_is_a_usage_error(kind: Kind) -> None:
    with pytest.raises(UsageError, match="this is no number of"):
        of(kind).run(print, 0)


def test_a_process_that_is_a_rank_already_is_not_forked() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="this process is a rank already"):
            of("processes").run(print, 2)
    finally:
        dist.destroy_process_group()


def test_a_lost_connection_is_never_the_cause_where_another_rank_has_raised() -> None:
    """gloo gives up a connection at once, and who had it may say so before the one that gave up has said why."""
    gone = Raised(1, "RuntimeError: Connection closed by peer", exception="RuntimeError")
    cause = Raised(0, "RuntimeError: Timed out waiting 20ms", exception="RuntimeError")
    said = [
        Said("raised", gone, True, moment=1),
        Said("raised", cause, True, moment=2),
        Said("gone", -9, True, moment=3),
    ]
    assert sorted(said, key=gloo_ranks._order) == [said[2], said[1], said[0]]
    assert gloo_ranks._next(gone.text) == [gloo_ranks._NEXT]


KINDS_SESSION = """
import pytest
import torch.distributed as dist


def step():
    dist.init_process_group("gloo")
    return dist.get_rank()


@pytest.mark.parametrize("kind", ["simulated", "processes", "simulated-cuda", "gloo-cuda", "nccl"])
def test_kind(world, kind):
    there = world.on(kind)
    assert there.device == ("cuda" if "cuda" in kind or kind == "nccl" else "cpu")
    assert there.run(step, 2) == [0, 1]
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_ranks_that_the_machine_lacks_are_skipped_and_the_summary_names_the_metal(
    place: pytest.Pytester, workers: str
) -> None:
    place.makepyfile(KINDS_SESSION)
    done = place.runpytest_subprocess("-rs", "-n", workers)
    done.assert_outcomes(passed=2, skipped=3)
    done.stdout.fnmatch_lines(["*no nccl ranks: ranks on a GPU need one; this is torch*"], consecutive=False)
    told = [line for line in done.outlines if line.startswith("world: ")]
    assert told == [
        "world: 1 run on simulated ranks, in memory on the processors",
        "world: 1 run on processes ranks, over gloo on the processors",
    ]
