"""Small programs of one call each, which both engines must take alike. Loaded as "file.py:attribute"."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Features, Setup

Program = Callable[[int, int], Tensor]


class _Trainer:
    """Its step runs the program; what it shows as parameters is what came of it."""

    def __init__(self, program: Program, setup: Setup) -> None:
        self._program, self._setup, self._result = program, setup, torch.empty(0)

    def step(self, batch: Batch) -> None:
        self._result = self._program(self._setup.rank, self._setup.world_size)

    def parameters(self) -> dict[str, Tensor]:
        return {"result": self._result.clone()}


class program:
    """An adapter made of a function of (rank, number of ranks)."""

    def __init__(self, function: Program) -> None:
        self.name, self._function = function.__name__, function
        self.features = Features(promises=frozenset({"plain"}))

    def build(self, model: nn.Module, setup: Setup) -> _Trainer:
        return _Trainer(self._function, setup)


def _rows(rank: int) -> Tensor:
    """[3, 2], other numbers on each rank."""
    return torch.arange(6.0).reshape(3, 2) * (rank + 1)


def _columns(rank: int) -> Tensor:
    """The same values, transposed in memory."""
    return _rows(rank).t().contiguous().t()


def _reversed(size: int) -> dist.ProcessGroup:
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    assert isinstance(group, dist.ProcessGroup)
    return group


# -- groups that are not in ascending order ------------------------------------------------------------------------


@program
def gather_in_reverse(rank: int, size: int) -> Tensor:
    found = torch.empty(size)
    dist.all_gather_into_tensor(found, torch.full((1,), float(rank)), group=_reversed(size))
    return found


@program
def reduce_scatter_in_reverse(rank: int, size: int) -> Tensor:
    found = torch.empty(1)
    dist.reduce_scatter_tensor(found, torch.arange(float(size)) + 10 * rank, group=_reversed(size))
    return found


@program
def broadcast_in_reverse(rank: int, size: int) -> Tensor:
    group, one, two = _reversed(size), torch.full((1,), float(rank)), torch.full((1,), float(rank))
    dist.broadcast(one, src=0, group=group)
    dist.broadcast(two, group_src=0, group=group)
    return torch.cat([one, two])


# -- asynchronous calls with a root --------------------------------------------------------------------------------


@program
def broadcast_in_flight(rank: int, size: int) -> Tensor:
    found = _rows(rank)
    dist.broadcast(found, 1, async_op=True).wait()
    return found


# -- memory: transposed tensors and tensors with gaps ---------------------------------------------------------------


@program
def all_reduce_transposed(rank: int, size: int) -> Tensor:
    found = _columns(rank)
    dist.all_reduce(found)
    return found.contiguous()


@program
def all_reduce_transposed_on_one_rank(rank: int, size: int) -> Tensor:
    found = _columns(rank) if rank == 0 else _rows(rank)
    dist.all_reduce(found)
    return found.contiguous()


@program
def broadcast_transposed_on_one_rank(rank: int, size: int) -> Tensor:
    found = _columns(rank) if rank == 0 else _rows(rank)
    dist.broadcast(found, 0)
    return found.contiguous()


@program
def scatter_of_transposed(rank: int, size: int) -> Tensor:
    found = torch.empty(3, 2)
    dist.scatter(found, [_columns(other) for other in range(size)] if rank == 0 else None, 0)
    return found


@program
def gather_of_transposed(rank: int, size: int) -> Tensor:
    found = torch.empty(3 * size, 2)
    dist.all_gather_into_tensor(found, _columns(rank))
    return found


@program
def reduce_scatter_of_transposed(rank: int, size: int) -> Tensor:
    found = torch.empty(3, 2)
    dist.reduce_scatter(found, [_columns(rank) for _ in range(size)])
    return found


@program
def all_reduce_with_gaps(rank: int, size: int) -> Tensor:
    found = torch.arange(6.0) * (rank + 1)
    dist.all_reduce(found[::2])
    return found


@program
def gather_of_gaps(rank: int, size: int) -> Tensor:
    found = torch.empty(3 * size)
    dist.all_gather_into_tensor(found, (torch.arange(6.0) * (rank + 1))[::2])
    return found


@program
def all_to_all_of_gaps(rank: int, size: int) -> Tensor:
    found = torch.empty(size)
    dist.all_to_all_single(found, torch.arange(2.0 * size)[::2])
    return found


# -- forms that do not fit -----------------------------------------------------------------------------------------


@program
def gather_into_too_much(rank: int, size: int) -> Tensor:
    found = torch.zeros(2 * size + 1)
    dist.all_gather_into_tensor(found, torch.ones(2))
    return found


@program
def gather_into_another_dtype(rank: int, size: int) -> Tensor:
    found = torch.zeros(2 * size, dtype=torch.float64)
    dist.all_gather_into_tensor(found, torch.ones(2))
    return found


@program
def reduce_scatter_of_too_much(rank: int, size: int) -> Tensor:
    found = torch.zeros(2)
    dist.reduce_scatter_tensor(found, torch.ones(2 * size + 1))
    return found


@program
def reduce_scatter_into_another_dtype(rank: int, size: int) -> Tensor:
    found = torch.zeros(2)
    dist.reduce_scatter_tensor(found, torch.ones(2 * size, dtype=torch.float64))
    return found


@program
def gather_into_a_short_list(rank: int, size: int) -> Tensor:
    found = [torch.zeros(2) for _ in range(size - 1)]
    dist.all_gather(found, torch.ones(2))
    return torch.cat(found)


@program
def gather_into_a_long_list(rank: int, size: int) -> Tensor:
    found = [torch.zeros(2) for _ in range(size + 1)]
    dist.all_gather(found, torch.ones(2))
    return torch.cat(found)


@program
def gather_into_another_shape(rank: int, size: int) -> Tensor:
    found = [torch.zeros(1, 2) for _ in range(size)]
    dist.all_gather(found, torch.ones(2))
    return torch.cat(found)


# -- pieces that are not alike, sparse tensors ---------------------------------------------------------------------


@program
def gather_uneven_pieces(rank: int, size: int) -> Tensor:
    found = [torch.zeros(place + 1) for place in range(size)]
    dist.all_gather(found, torch.ones(rank + 1))
    return torch.cat(found)


@program
def reduce_scatter_uneven_pieces(rank: int, size: int) -> Tensor:
    found = torch.zeros(rank + 1, 2)
    dist.reduce_scatter(found, [torch.full((place + 1, 2), place + 10.0 * rank) for place in range(size)])
    return found


@program
def all_reduce_sparse(rank: int, size: int) -> Tensor:
    found = torch.sparse_coo_tensor([[rank, 3, 3]], [[1.0], [2.0], [4.0 * rank]], (5, 1), check_invariants=True)
    dist.all_reduce(found)
    return torch.cat([found.to_dense().flatten(), torch.tensor([float(found.is_coalesced()), found._nnz()])])


@program
def sum_premultiplied(rank: int, size: int) -> Tensor:
    found = torch.ones(2)
    dist.all_reduce(found, op=dist._make_nccl_premul_sum(0.5))
    return found


PROGRAMS = tuple(name for name, value in list(globals().items()) if isinstance(value, program))


# -- memory ----------------------------------------------------------------------------------------------------------


@program
def memory_without_values(rank: int, size: int) -> Tensor:
    torch.use_deterministic_algorithms(False)
    return torch.empty(2)
