"""Memory that nobody has written holds poison on every rank, whatever the program switches, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdpcheck.compat import torch_private
from fsdpcheck.engines._common import poison
from fsdpcheck.execution import RankResult
from tests.simulation.simulator import Simulator, keep

ALLOCATIONS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3),
    "empty of float64": lambda: torch.empty(3, dtype=torch.float64),
    "empty of bfloat16": lambda: torch.empty(3, dtype=torch.bfloat16),
    "empty of complex": lambda: torch.empty(3, dtype=torch.complex128),
    "empty_like": lambda: torch.empty_like(torch.ones(3)),
    "empty_strided": lambda: torch.empty_strided((3,), (2,)),
    "empty_permuted": lambda: torch.empty_permuted((3, 2), (1, 0)),
    "new_empty": lambda: torch.ones(1).new_empty(3),
    "new_empty_strided": lambda: torch.ones(1).new_empty_strided((3,), (1,)),
    "resize_": lambda: torch.ones(1).resize_(3)[1:],
}


@pytest.fixture(autouse=True)
def settings_are_as_before() -> Iterator[None]:
    def settings() -> list[object]:
        flags = torch_private.allocator_fills()
        functions = [getattr(torch._C, name) for name in torch_private.DETERMINISTIC]
        values = [functions[0](), functions[1](), functions[3]()]
        return [*functions, *values, *(flag.value for flag in flags or ())]

    before = settings()
    yield
    assert settings() == before


@pytest.mark.parametrize("memory", ["poison", "noted"])
def test_every_way_to_memory_without_values_gives_nan(memory: str) -> None:
    with poison.of_ranks(memory):
        for name, allocate in ALLOCATIONS.items():
            assert allocate().isnan().all(), name
        assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        assert (torch.empty(3, dtype=torch.uint8) == 255).all()


def test_memory_that_torch_gives_no_nan_is_filled_by_the_allocator() -> None:
    """Of float64 no NaN, but nothing that a right number could be; and as float32 one."""
    assert torch_private.allocator_fills() is not None
    with poison.of_ranks("poison"):
        storage = torch.ones(2, dtype=torch.float64).untyped_storage()
        storage.resize_(0)
        storage.resize_(64)
        grown = torch.tensor([], dtype=torch.int32).set_(storage)  # type: ignore[call-overload]
        assert (grown == torch_private.JUNK).all()
        assert grown.view(torch.float32).isnan().all()
        assert (grown.view(torch.float64) > 1e308).all()


def test_zeros_are_given_where_a_finding_is_looked_into() -> None:
    with poison.of_ranks("zeros"):
        for name, allocate in ALLOCATIONS.items():
            assert not allocate().any(), name


def test_a_program_is_answered_as_if_it_alone_had_set_anything() -> None:
    with poison.of_ranks("poison"):
        assert not torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        assert (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()) == (True, 2)
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        torch.set_deterministic_debug_mode("warn")
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_program_that_switches_the_fill_off_keeps_it_and_reads_what_it_has_set() -> None:
    with poison.of_ranks("poison"):
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert torch.empty(3).isnan().all()


def test_what_has_no_deterministic_form_on_a_cpu_runs_and_gives_the_same() -> None:
    """All such operations that torch has for CPUs; on ranks warnings are ignored."""
    pooled, where = torch.nn.functional.max_pool1d(torch.arange(8.0).view(1, 1, 8), 2, return_indices=True)

    def results() -> list[Tensor]:
        return [
            torch.zeros(3).put_(torch.tensor([1]), torch.ones(1)),
            torch.nn.functional.max_unpool1d(pooled, where, 2),
            torch.nn.functional.max_unpool2d(pooled[None], where[None], (1, 2)),
            torch.zeros(3).index_put_((torch.tensor([0, 0, 2]),), torch.ones(3), accumulate=True),
            torch.zeros(3).index_copy_(0, torch.tensor([2, 0]), torch.ones(2)),
            torch.zeros(3).scatter_add_(0, torch.tensor([0, 0, 2]), torch.ones(3)),
            torch.bincount(torch.tensor([1, 1, 2]), torch.ones(3)),
        ]

    wanted = results()
    with warnings.catch_warnings(), poison.of_ranks("poison"):
        warnings.simplefilter("ignore")
        for got, right in zip(results(), wanted, strict=True):
            assert torch.equal(got, right)


def test_each_simulated_rank_has_settings_of_its_own_and_poison(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        torch.use_deterministic_algorithms(rank == 0)
        dist.barrier()
        keep(result, empty=torch.empty(2), asked=torch.tensor(torch.are_deterministic_algorithms_enabled()))

    for rank, own in enumerate(simulate(body).ranks):
        assert own.initial["empty"].isnan().all()
        assert bool(own.initial["asked"]) == (rank == 0)
