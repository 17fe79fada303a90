"""Meshes on simulated ranks are each rank's own and the newest run's, whatever DTensor remembers of earlier ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from fsdpcheck.compat import dtensor_private
from fsdpcheck.engines._simulated.in_process import _foreign_code
from fsdpcheck.execution import RankResult, RunRequest
from tests.common.cases_by_hand import SMALLEST
from tests.simulation.simulator import Simulator, keep
from tests.simulation.test_programs import values
from tests.toys.averaging import Averaging


def test_an_uneven_tensor_on_a_mesh_of_two_dimensions_comes_back_whole(simulate: Simulator) -> None:
    """With 3, 7 and 11 rows values were wrong on every rank, with 5, 9 and 13 a mismatch was reported."""

    def body(rank: int, size: int, result: RankResult) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for rows in (3, 5, 7, 9, 11, 13):
            whole = torch.arange(3.0 * rows).view(rows, 3)
            found = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).full_tensor()
            assert torch.equal(found, whole), f"{rows} rows on rank {rank}"

    execution = simulate(body, 4)
    assert execution.failure is None, execution.failure.text


def test_meshes_of_two_ranks_differ_and_those_of_one_rank_are_equal(simulate: Simulator) -> None:
    meshes: dict[int, list[DeviceMesh]] = {0: [], 1: []}

    def body(rank: int, size: int, result: RankResult) -> None:
        meshes[rank] += [init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (size,))]
        sent = [meshes[rank][0] if rank == 0 else None]
        dist.broadcast_object_list(sent, src=0)
        assert sent[0] == meshes[rank][0]

    for _ in range(2):
        execution = simulate(body)
        assert execution.failure is None, execution.failure.text
    assert len({*meshes[0], *meshes[1]}) == 2
    assert meshes[0][0] == meshes[0][3] != meshes[1][0]
    assert DeviceMesh("cpu", [0], _init_backend=False, _rank=0)._thread_id is None, "patched after the run"


def test_results_of_operators_on_a_mesh_are_on_the_mesh_of_their_rank(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        mesh = init_device_mesh("cpu", (size,))
        one = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        found = (one * 2).redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        assert found.device_mesh.get_local_rank() == rank
        keep(result, value=found.to_local())

    assert [value.tolist() for value in values(simulate(body))] == [[0.0, 2.0, 4.0], [6.0, 8.0]]


def test_a_mesh_of_an_earlier_run_does_not_come_back(simulate: Simulator) -> None:
    """DTensor gives results the mesh of the first call like theirs: its groups are gone, or their names are others'."""

    def body(others: int, rank: int, size: int, result: RankResult) -> None:
        for _ in range(others):
            dist.new_group([0, 1, 2, 3])
        mesh = init_device_mesh("cpu", (2, 2))
        column = DTensor.from_local(torch.full((1,), float(rank)), mesh, [Replicate(), Shard(0)], run_check=False)
        keep(result, whole=column.detach().full_tensor())  # a detached DTensor has the mesh that was remembered

    for others in (0, 3, 1):
        execution = simulate(partial(body, others), 4)
        assert execution.failure is None, execution.failure.text
        assert [result.initial["whole"].tolist() for result in execution.ranks] == [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2


@pytest.fixture
def fresh() -> Iterator[Simulator]:
    """Ranks that know nothing of meshes yet."""
    simulator = Simulator()
    yield simulator
    simulator.engine.close()


class _Propagations:
    """Counts how often DTensor finds out anew what an operator does to placements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._native = 0, ShardingPropagator._propagate_tensor_meta_non_cached
        monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", self.counted())

    def counted(self):  # type: ignore[no-untyped-def]
        def call(propagator, schema):  # type: ignore[no-untyped-def]
            self.count += 1
            return self._native(propagator, schema)

        return call


def _column_sum(others: int, rank: int, size: int, result: RankResult) -> None:
    """Sum over a column of a mesh, of a slice of it that is taken twice, after ``others`` other groups."""
    for _ in range(others):
        dist.new_group([0, 1, 2, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    for dimension in ("row", "column", "row"):
        part = mesh[dimension]
        one = DTensor.from_local(torch.full((1,), 1.0 + rank), part, [Shard(0)], run_check=False)
        result.initial[dimension] = (one * 3).detach().full_tensor()
    assert mesh["row"].get_group() is mesh.get_group("row")


def test_what_dtensor_knows_of_a_mesh_is_kept_from_run_to_run(
    fresh: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    propagations, counts = _Propagations(monkeypatch), []
    for others in (0, 3, 1):
        propagations.count = 0
        execution = fresh(partial(_column_sum, others), 4)
        assert execution.failure is None, execution.failure.text
        assert [rank.initial["row"].tolist() for rank in execution.ranks] == [[3.0, 9.0], [6.0, 12.0]] * 2
        assert [rank.initial["column"].tolist() for rank in execution.ranks] == [[3.0, 6.0]] * 2 + [[9.0, 12.0]] * 2
        counts.append(propagations.count)
    assert counts[0] > 0 == counts[1] == counts[2]


@pytest.mark.parametrize("adapter", ["fully_shard", f"{__file__}:one"], ids=["built-in", "foreign"])
def test_ranks_share_what_they_find_out_but_for_foreign_code_and_get_answers_on_their_own_mesh(
    fresh: Simulator, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    propagations, counts = _Propagations(monkeypatch), []

    def body(rank: int, size: int, result: RankResult) -> None:
        mesh = init_device_mesh("cpu", (size,))
        one = distribute_tensor(torch.arange(7.0).view(7, 1), mesh, [Shard(0)])
        found = [one * 3, one + one, one.t(), one.sum(), torch.cat([one, one])]
        assert all(each.device_mesh is mesh for each in found)
        keep(result, value=torch.cat([each.full_tensor().flatten() for each in found]))

    for size in (2, 4):
        propagations.count = 0
        wanted = torch.arange(7.0)
        for value in values(fresh(body, size, adapter=adapter)):
            parts = [wanted * 3, wanted * 2, wanted, torch.tensor([21.0]), wanted.repeat(2)]
            assert torch.equal(value, torch.cat(parts))
        counts.append(propagations.count)
    assert counts[0] > 4
    assert counts[1] == counts[0] * (1 if adapter == "fully_shard" else 2)


def test_what_a_user_installs_is_foreign_code() -> None:
    request = RunRequest(SMALLEST, "fully_shard", installs=("fsdpcheck.impl.faults:averaged_twice",))
    assert _foreign_code(request) == ""
    assert _foreign_code(replace(request, installs=("mine:rules",))) == "mine:rules"
    assert _foreign_code(replace(request, adapter="mine.py:adapter")) == "mine.py:adapter"


def test_what_depends_on_the_rank_is_found_out_by_each(fresh: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape that new memory is asked for with is, on each rank, that of its own shard."""
    propagations = _Propagations(monkeypatch)

    def body(rank: int, size: int, result: RankResult) -> None:
        one = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (size,)), [Shard(0)])
        keep(result, value=one.new_zeros(one.shape).to_local())

    assert [len(value) for value in values(fresh(body, 4))] == [2, 2, 1, 0]
    assert propagations.count == 4


def _forgotten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever a rank forgets its meshes."""
    forgotten: list[int] = []

    def forget() -> None:
        forgotten.append(1)
        native()

    native = dtensor_private.forget_meshes
    monkeypatch.setattr(dtensor_private, "forget_meshes", forget)
    return forgotten


def test_two_meshes_that_are_equal_have_their_own_groups_and_are_forgotten(
    fresh: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch cannot tell them apart either: a result is on the mesh that the first call like it was on.

    What an operator does to placements stays known: every rank gets it on its own mesh.
    """
    propagations, forgotten, counts = _Propagations(monkeypatch), _forgotten(monkeypatch), []

    def body(rank: int, size: int, result: RankResult) -> None:
        first, second = (init_device_mesh("cpu", (2, 2)) for _ in range(2))
        assert first == second
        assert first.get_group(0) is not second.get_group(0)
        one = DTensor.from_local(torch.full((1,), 1.0 + rank), second, [Replicate(), Shard(0)], run_check=False)
        keep(result, value=(one + one).full_tensor())

    for _ in range(2):
        propagations.count = 0
        assert [value.tolist() for value in values(fresh(body, 4))] == [[2.0, 4.0]] * 2 + [[6.0, 8.0]] * 2
        counts.append(propagations.count)
    assert counts[0] > 0 == counts[1]
    assert len(forgotten) == 2 * 4


def test_a_thread_forgets_before_it_ends(fresh: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor keeps Python objects in it, which are destroyed behind it, without Python's lock: that aborts."""
    forgotten, others = _forgotten(monkeypatch), {*threading.enumerate()}
    assert fresh(partial(_column_sum, 0), 4).failure is None
    assert not forgotten
    ranks = {*threading.enumerate()} - others
    fresh.engine.close()
    for thread in ranks:
        thread.join()
    assert len(ranks) == len(forgotten) == 4


def test_to_forget_imports_nothing(fresh: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was never closed ends with the interpreter, where imports fail."""
    misses: list[int] = []

    def body(rank: int, size: int, result: RankResult) -> None:
        one = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        for forgets in (False, False, True):
            if forgets:
                with monkeypatch.context() as ending:
                    ending.setattr(sys, "meta_path", [])
                    ending.delitem(sys.modules, "torch.distributed.tensor.debug", raising=False)
                    dtensor_private.forget_meshes()
            before = torch._C._get_DTensor_sharding_propagator_cache_stats()[1]
            assert torch.equal((one + one).to_local(), torch.full((2,), 2.0))
            misses.append(torch._C._get_DTensor_sharding_propagator_cache_stats()[1] - before)

    execution = fresh(body, 1)
    assert execution.failure is None, execution.failure.text
    assert misses[1] == 0 < misses[2]


def test_another_implementation_learns_anew(fresh: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have registered rules for operators; built-in ones have none."""
    propagations, counts = _Propagations(monkeypatch), []
    for adapter in ("fully_shard", "reference", f"{__file__}:one", f"{__file__}:one", "fully_shard"):
        propagations.count = 0
        execution = fresh(partial(_column_sum, 0), 4, adapter=adapter)
        assert execution.failure is None, execution.failure.text
        counts.append(propagations.count > 0)
    assert counts == [True, False, True, False, True]


one = Averaging("one")


def test_what_is_known_of_meshes_is_forgotten_in_the_end(fresh: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, counts = _forgotten(monkeypatch), []
    monkeypatch.setattr(dtensor_private.Meshes, "_RUNS", 2)
    for _ in range(4):
        assert fresh(partial(_column_sum, 0), 4).failure is None
        counts.append(len(forgotten))
    assert counts == [0, 4, 4, 8]


def test_what_is_known_of_operators_is_forgotten_where_it_is_much(
    fresh: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    propagations, counts = _Propagations(monkeypatch), []
    monkeypatch.setattr(dtensor_private.Meshes, "_RUNS", 1)  # else each rank knows it itself
    for most in (100, 100, 1, 1):
        monkeypatch.setattr(dtensor_private._Propagation, "_MOST", most)
        propagations.count = 0
        assert fresh(partial(_column_sum, 0), 4).failure is None
        counts.append(propagations.count > 0)
    assert counts == [True, False, False, True]
