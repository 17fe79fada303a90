"""Every collective of simulated ranks computes what torch.distributed says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fsdpcheck
from fsdpcheck import simulate as simulated
from fsdpcheck.case import Arithmetic, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import RankResult, RunRequest
from tests.simulation.simulator import Simulator, keep


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_collectives_compute(simulate: Simulator, world_size: int) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        mine = torch.arange(size) + 10 * rank
        total = mine.clone()
        dist.all_reduce(total)
        largest = mine.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        gathered = torch.empty(size * size, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, mine)
        listed = [torch.empty(size, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(listed, mine)
        scattered = torch.empty(1, dtype=torch.int64)
        dist.reduce_scatter_tensor(scattered, mine)
        mean = torch.empty(1, dtype=torch.float64)
        dist.reduce_scatter_tensor(mean, mine.double(), op=dist.ReduceOp.AVG)
        sent = mine.clone()
        dist.broadcast(sent, src=size - 1)
        swapped = torch.empty_like(mine)
        dist.all_to_all_single(swapped, mine)
        objects: list[object] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(size)]
        dist.barrier()
        keep(result, total=total, largest=largest, gathered=gathered, listed=torch.cat(listed))
        keep(result, scattered=scattered, mean=mean, sent=sent, swapped=swapped)

    execution = simulate(body, world_size)
    assert execution.failure is None, execution.failure
    table = torch.arange(world_size) + 10 * torch.arange(world_size)[:, None]
    for rank, result in enumerate(execution.ranks):
        got = result.initial
        assert torch.equal(got["total"], table.sum(0))
        assert torch.equal(got["largest"], table.amax(0))
        assert torch.equal(got["gathered"], table.flatten())
        assert torch.equal(got["listed"], table.flatten())
        assert got["scattered"].item() == table.sum(0)[rank]
        assert got["mean"].item() == table.double().sum(0)[rank] / world_size
        assert torch.equal(got["sent"], table[-1])
        assert torch.equal(got["swapped"], table[:, rank])


def test_averages_can_be_premultiplied() -> None:
    """ "premultiply" is the sum of fl(x * fl(1/W)) in rank order; elsewhere it is fl(sum / W)."""
    values = torch.tensor([1.0, 3.0, 0.1, 7.0, 1e-3, 5.0, 1.5])

    def program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        own = values[rank].clone()
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        piece = torch.empty(1)
        dist.reduce_scatter_tensor(piece, values.repeat(7, 1).T[rank].contiguous(), op=dist.ReduceOp.AVG)
        keep(result, own=own, piece=piece, sent=values[rank])

    engine = InProcessEngine(program=program)
    inverse, found = torch.ones(()) / 7, {}
    for averaging in ("divide", "premultiply"):
        case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(7), arithmetic=Arithmetic(averaging=averaging))
        execution = engine.run(RunRequest(case, "fully_shard"))
        assert execution.failure is None, execution.failure.text
        assert {result.initial["own"].item() for result in execution.ranks} == {
            execution.ranks[0].initial["own"].item()
        }
        found[averaging] = execution.ranks[3].initial
    engine.close()
    total, premultiplied = torch.zeros(()), torch.zeros(())
    for value in values:
        total, premultiplied = total + value, premultiplied + value * inverse
    assert not torch.equal(total / 7, premultiplied)
    assert found["divide"]["own"] == found["divide"]["piece"][0] == total / 7
    assert found["premultiply"]["own"] == found["premultiply"]["piece"][0] == premultiplied
    assert found["premultiply"]["sent"] == values[3]


def test_rooted_collectives_compute(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        rows = [torch.empty(1) for _ in range(size)] if rank == 1 else None
        dist.gather(torch.full((1,), float(rank)), rows, dst=1)
        piece = torch.empty(1)
        dist.scatter(piece, [torch.full((1,), 7.0 + other) for other in range(size)] if rank == 0 else None, src=0)
        total = torch.ones(1)
        dist.reduce(total, dst=2)
        keep(result, rows=torch.cat(rows) if rows else torch.empty(0), piece=piece, total=total)

    execution = simulate(body, 3)
    assert execution.failure is None, execution.failure
    assert torch.equal(execution.ranks[1].initial["rows"], torch.arange(3.0))
    assert [result.initial["piece"].item() for result in execution.ranks] == [7.0, 8.0, 9.0]
    assert execution.ranks[2].initial["total"].item() == 3.0
    for result in execution.ranks[:2]:  # gloo leaves partial sums there: nobody may use them
        assert bool(result.initial["total"].isnan().all())


def test_groups_of_some_ranks_do_not_outlive_the_run(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        pair = dist.new_group([0, 2])
        value = torch.ones(1)
        if rank != 1:
            dist.all_reduce(value, group=pair)
        keep(result, value=value, groups=torch.tensor(len(dist.distributed_c10d._world.pg_map)))

    names = []
    for _ in range(2):
        execution = simulate(body, 3)
        assert execution.failure is None, execution.failure
        assert [result.initial["value"].item() for result in execution.ranks] == [2.0, 1.0, 2.0]
        assert [result.initial["groups"].item() for result in execution.ranks] == [2, 1, 2]
        names.append([call.group_name for call in execution.ranks[0].trace])
    assert names[0] == names[1]


def test_a_group_may_be_made_and_never_used(simulate: Simulator) -> None:
    execution = simulate(lambda rank, size, result: keep(result, size=torch.tensor(dist.new_group([0, 1]).size())), 2)
    assert execution.failure is None, execution.failure.text


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX])
def test_ranks_may_give_a_list_where_others_give_one_tensor(simulate: Simulator, op: dist.ReduceOp.RedOpType) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        mine = torch.arange(2.0) + 10 * rank
        everyone, piece = torch.zeros(size * 2), torch.zeros(2)
        terms = (torch.arange(size * 2.0) - size).pow(rank + 1) / 4
        if rank == 1:
            dist.all_gather(list(everyone.view(size, 2)), mine)
            dist.reduce_scatter(piece, list(terms.view(size, 2)), op=op)
        else:
            dist.all_gather_into_tensor(everyone, mine)
            dist.reduce_scatter_tensor(piece, terms, op=op)
        keep(result, everyone=everyone, piece=piece, terms=terms)

    execution = simulate(body, 3)
    assert execution.failure is None
    terms = torch.stack([result.initial["terms"] for result in execution.ranks])
    wanted = {dist.ReduceOp.SUM: terms.sum(0), dist.ReduceOp.AVG: terms.sum(0) / 3, dist.ReduceOp.MAX: terms.amax(0)}
    for rank, result in enumerate(execution.ranks):
        assert result.initial["everyone"].tolist() == [0, 1, 10, 11, 20, 21]
        assert torch.equal(result.initial["piece"], wanted[op].view(3, 2)[rank])


def test_a_program_that_asks_for_nccl_may_make_calls_that_only_nccl_takes() -> None:
    """Uneven gathers, premultiplied sums, calls that are coalesced: gloo refuses each."""

    def program(backend: str) -> object:
        dist.init_process_group(backend)
        rank, size = dist.get_rank(), dist.get_world_size()
        pieces = [torch.zeros(place + 1) for place in range(size)]
        dist.all_gather(pieces, torch.full((rank + 1,), float(rank)))
        half, one, two = torch.ones(2), torch.ones(1), torch.ones(1)
        dist.all_reduce(half, op=dist._make_nccl_premul_sum(0.5))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_gather([torch.empty(1) for _ in range(size)], one)
            dist.broadcast(two, 0)
        manager.wait()
        return dist.get_backend(), torch.cat(pieces).tolist(), half.tolist()

    assert fsdpcheck.simulate(program, 3, ("nccl",)).check().returned == (("nccl", [0, 1, 1, 2, 2, 2], [1.5, 1.5]),) * 3
    failure = fsdpcheck.simulate(program, 3, ("gloo",)).failure
    assert failure is not None
    assert "all_gather cannot be called like this" in failure.text


def test_parts_that_one_rank_sends_and_another_does_not_take_are_a_mismatch() -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        dist.all_to_all_single(torch.empty(3 + rank), torch.ones(4), [1, 2 + rank], [2, 2])

    failure = fsdpcheck.simulate(program, 2).failure
    assert failure is not None
    assert failure.kind == "mismatch"
    assert "  rank 0 sends 2 of torch.float32 to rank 0, which takes 1 of torch.float32\n" in failure.text


@pytest.mark.parametrize("op", [dist.ReduceOp.BAND, dist.ReduceOp.AVG])
def test_what_cannot_be_reduced_raises_on_every_rank(op: dist.ReduceOp.RedOpType) -> None:
    def program() -> float:
        dist.init_process_group("gloo")
        value = torch.ones(2) if op == dist.ReduceOp.BAND else torch.ones(2, dtype=torch.int64)
        with pytest.raises(RuntimeError):
            dist.all_reduce(value, op)
        work = dist.all_reduce(value, op, async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError):
            work.wait()
        dist.all_reduce(total := torch.ones(1))
        return total.item()

    assert simulated(program, 3).check().returned == (3.0,) * 3


def test_a_root_that_is_no_rank_is_refused() -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        for root in (-1, 2):
            with pytest.raises(RuntimeError, match=f"invalid root rank: {root}\n  wanted  0 to 1"):
                dist.broadcast(torch.ones(1), group_src=root)

    simulated(program, 2).check()


def test_what_gloo_takes_for_tensors_of_several_gpus_is_refused_by_name() -> None:
    def program(count: int) -> None:
        dist.init_process_group("gloo")
        dist.group.WORLD.allreduce([torch.ones(1)] * count).wait()  # type: ignore[union-attr]

    several, none = (simulated(program, 2, [count]).failure for count in (2, 0))
    assert several is not None
    assert none is not None
    assert (several.kind, several.text.splitlines()[1]) == ("adapter", "  got     float32[1], float32[1]")
    assert "requires non-empty tensor lists" in none.text


def test_a_transposed_tensor_is_no_value_for_all_to_all() -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_to_all_single(torch.empty(2, 2), torch.ones(2, 2).t())

    simulated(program, 2).check()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_lists_of_uneven_tensors_are_exchanged_as_on_nccl_and_refused_as_by_gloo(backend: str) -> None:
    def program() -> list[list[float]]:
        dist.init_process_group(backend)
        rank = dist.get_rank()
        got = [torch.zeros(other + 1) for other in range(2)]
        dist.all_to_all(got, [torch.full((rank + 1,), float(rank))] * 2)
        return [tensor.tolist() for tensor in got]

    done = simulated(program, 2)
    if backend == "nccl":
        assert done.check().returned == ([[0.0], [1.0, 1.0]],) * 2
    else:
        assert done.failure is not None
        assert "got     float32[2] beside float32[1]" in done.failure.text


def test_a_list_of_all_to_all_has_a_tensor_a_rank() -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        with pytest.raises(RuntimeError, match="a list of 1 tensors"):
            dist.all_to_all([torch.zeros(1)], [torch.zeros(1)])

    simulated(program, 2).check()


REFUSED_BY_GLOO = {
    "dist.broadcast(torch.eye(2).to_sparse(), 0)": "a sparse tensor",
    "dist.isend(torch.ones(1), 0, tag=-1)": "Tag must be nonnegative",
    "dist.all_gather_single(torch.empty(1, 2), torch.ones(2))": "along the first dimension",
    "dist.reduce_scatter_single(torch.empty(2), torch.ones(1, 2))": "along the first dimension",
    "dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2, 2])": "Number of tensor splits",
    "dist.all_to_all([torch.empty(1)] * 2, [torch.ones(1)] * 2)": "a list of 2 tensors",
    "dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX)": "sparse tensors are summed",
}
"""By call, on one rank, words of our refusal."""


@pytest.mark.parametrize("call", [call for call in REFUSED_BY_GLOO if hasattr(dist, call[5 : call.index("(")])])
def test_what_gloo_refuses_is_refused(call: str) -> None:
    names = {"dist": dist, "torch": torch}

    def program() -> None:
        dist.init_process_group("gloo")
        with pytest.raises((RuntimeError, fsdpcheck.errors.NotSupported), match=REFUSED_BY_GLOO[call]):
            eval(call, names)

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises((RuntimeError, ValueError)):
            eval(call, names)
    finally:
        dist.destroy_process_group()
    simulated(program, 1).check()
