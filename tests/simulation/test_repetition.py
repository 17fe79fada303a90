"""Unmodified programs on simulated ranks, repeated bit for bit; what voids the claim for all schedules."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdpcheck.execution import RankResult
from tests.simulation.simulator import Simulator, failure_of, keep


def _fsdp2(rank: int, size: int, result: RankResult) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.arange(6.0, dtype=torch.float64).view(2, 3) + rank + step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    keep(result, **{name: value.full_tensor().detach() for name, value in model.named_parameters()})  # type: ignore[operator]


def test_fsdp2_repeats_bit_for_bit_under_both_schedules(simulate: Simulator) -> None:
    first, again, turned = simulate(_fsdp2, 3), simulate(_fsdp2, 3), simulate(_fsdp2, 3, "reversed")
    for other in (again, turned):
        assert other.failure is None, other.failure
        for one, two in zip(first.ranks, other.ranks, strict=True):
            assert one.trace == two.trace
            assert all(torch.equal(one.initial[name], two.initial[name]) for name in one.initial)
    assert first.voids == ()
    subjects = [call.subject for call in first.ranks[0].trace if call.op == "reduce_scatter"]
    assert subjects == ["2", "0", "2", "0"]


def test_polling_and_the_store_void_the_claim_for_all_schedules(simulate: Simulator) -> None:
    def polls(rank: int, size: int, result: RankResult) -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        while not work.is_completed():
            pass

    assert simulate(polls).voids == ("a work was polled",)

    def stores(rank: int, size: int, result: RankResult) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key {rank}", "x")
        store.get(f"key {1 - rank}")

    execution = simulate(stores)
    assert execution.failure is None, execution.failure
    assert "store.get was used after init" in execution.voids


def test_waiting_for_a_key_nobody_sets_is_a_deadlock(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            dist.distributed_c10d._get_default_store().get("never")

    assert "never" in failure_of(simulate(body), "deadlock")


def test_a_call_nobody_answers_is_found_although_the_run_completed(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)

    execution = simulate(body)
    assert "never" in failure_of(execution, "unsafe")
    assert "a call was never waited for" in execution.voids


def test_calls_of_several_groups_under_way_void_the_claim_for_all_schedules(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        first, second = (one, two) if rank == 0 else (two, one)
        work = dist.all_reduce(torch.ones(1), group=first, async_op=True)
        dist.all_reduce(torch.ones(1), group=second, async_op=rank == 1)
        assert work is not None
        work.wait()

    assert "calls on several groups were under way together" in simulate(body).voids
