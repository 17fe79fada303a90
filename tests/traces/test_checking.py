"""What is wrong with a job: from its calls alone what the run itself said, and what calls do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import simulate
from fsdpcheck.traces import checking
from fsdpcheck.traces.job import completions, of_simulation


def _skips() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    if dist.get_rank():
        dist.barrier()


def _ring() -> None:
    dist.init_process_group("gloo")
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (a, b) if dist.get_rank() else (b, a):
        dist.all_reduce(torch.ones(1), group=group)


def _differs() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def _sends_to_nobody() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)


def _raises() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    raise ValueError("of the program")


@pytest.mark.parametrize("program", [_skips, _ring])
def test_calls_and_waits_alone_tell_the_hang_as_the_run_did(program: Callable[[], None]) -> None:
    done = simulate(program, 2, show=False)
    found = checking.finding(replace(of_simulation(done), failure=None))
    assert found is not None
    assert done.failure is not None
    assert (found.kind, found.text) == ("deadlock", done.failure.text)


def test_a_mismatch_is_told_with_the_line_of_each_side() -> None:
    found = checking.finding(replace(of_simulation(simulate(_differs, 2, show=False)), failure=None))
    assert found is not None
    head, *lines = found.text.split("\n")
    assert head.endswith("differs between its members in reduce op")
    assert [line.split(f" at {__file__}:")[0] for line in lines[:2]] == [
        f"  rank {rank}: all_reduce(float32[3]) {op} #0 on ranks [0, 1]" for rank, op in enumerate(("sum", "max"))
    ]


def test_what_the_calls_do_not_show_is_told_as_the_run_told_it() -> None:
    done = simulate(_raises, 2, show=False)
    assert checking.finding(of_simulation(done)) == done.failure
    assert checking.finding(replace(of_simulation(done), failure=None)) is None


def test_a_call_that_its_rank_got_out_of_alone_ended_there() -> None:
    """A backend that buffers lets the sender go on; the message never ends for anybody else."""
    job = of_simulation(simulate(_sends_to_nobody, 2, show=False))
    ((_, _, went_on),) = job.times[0]
    assert completions(job) == {0: [went_on], 1: []}
    job = of_simulation(simulate(_skips, 2, show=False))
    assert completions(job)[1][1] is None
