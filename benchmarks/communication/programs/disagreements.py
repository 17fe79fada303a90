"""Op type, reduction, shape, dtype and root differ between ranks: five classes of the matching of collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.communication.pairs import join, pair


@pair("op type differs", 3, "mismatch", ranks=(0,))
def rank_zero_reduces_to_itself(faulty: bool) -> object:
    """Rank 0 only wants the sum for its log and calls reduce, the others call all_reduce."""
    rank, _ = join()
    loss = torch.tensor([float(rank)])
    if faulty and rank == 0:
        dist.reduce(loss, dst=0)  # here
    else:
        dist.all_reduce(loss)  # here
    return loss.item()


@pair("op type differs", 2, "mismatch")
def one_gathers_while_the_other_reduces(faulty: bool) -> object:
    """A flag that was set on one rank only decides between gathering losses and summing them."""
    rank, size = join()
    loss, losses = torch.tensor([float(rank)]), torch.zeros(size)
    keep_all = rank == 1 if faulty else True
    if keep_all:
        dist.all_gather_into_tensor(losses, loss)  # here
        return losses.sum().item()
    dist.all_reduce(loss)  # here
    return loss.item()


@pair("op type differs", 2, "mismatch")
def scatter_meets_broadcast(faulty: bool) -> object:
    """The root deals out chunks, the other rank waits for the whole."""
    rank, size = join()
    mine = torch.zeros(2)
    if rank == 0:
        dist.scatter(mine, list(torch.arange(4.0).chunk(size)), src=0)  # here
    elif faulty:
        dist.broadcast(mine, src=0)  # here
    else:
        dist.scatter(mine, src=0)
    return mine.tolist()


@pair("reduction differs", 3, "mismatch", ranks=(1,))
def one_rank_takes_the_maximum(faulty: bool) -> object:
    """A copied line of the metrics keeps its MAX on one rank's branch."""
    rank, _ = join()
    seen = torch.tensor([float(rank + 1)])
    if faulty and rank == 1:
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)  # here
    else:
        dist.all_reduce(seen, op=dist.ReduceOp.SUM)  # here
    return seen.item()


@pair("reduction differs", 2, "mismatch")
def norm_of_another_order(faulty: bool) -> object:
    """A clip norm is infinite in one rank's configuration: it takes the maximum where the other adds squares."""
    rank, _ = join()
    order = float("inf") if faulty and rank == 1 else 2.0
    gradient = torch.tensor([3.0, 4.0])
    norm = gradient.abs().max() if order == float("inf") else (gradient**2).sum()
    reduction = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
    dist.all_reduce(norm, op=reduction)  # here
    return norm.item()


@pair("reduction differs", 2, "mismatch")
def flags_multiplied_or_bounded(faulty: bool) -> object:
    """Ranks agree on whether all are finite by a product on one and by a minimum on the other."""
    rank, _ = join()
    finite = torch.tensor([1.0])
    dist.all_reduce(finite, op=dist.ReduceOp.PRODUCT if faulty and rank == 0 else dist.ReduceOp.MIN)  # here
    return finite.item()


@pair("shape differs", 2, "mismatch")
def last_batch_is_smaller(faulty: bool) -> object:
    """Predictions of the last batch are gathered, which is smaller on the last rank."""
    rank, size = join()
    rows = 2 if rank == size - 1 else 3
    predictions = torch.full((rows, 2), float(rank))
    if not faulty:
        predictions = nn.functional.pad(predictions, (0, 0, 0, 3 - rows))
    parts = [torch.empty_like(predictions) for _ in range(size)]
    dist.all_gather(parts, predictions)  # here
    return [part.tolist() for part in parts]


@pair("shape differs", 2, "mismatch")
def transposed_gradient(faulty: bool) -> object:
    """One rank stores its weight transposed: as many numbers, in another order."""
    rank, _ = join()
    gradient = torch.arange(6.0).view(2, 3) * (rank + 1)
    if faulty and rank == 1:
        gradient = gradient.t().contiguous()
    dist.all_reduce(gradient)  # here
    return gradient.tolist()


@pair("shape differs", 3, "mismatch", ranks=(2,))
def table_grown_on_one_rank(faulty: bool) -> object:
    """One rank has seen a new token and made its embedding larger before the weights are broadcast."""
    rank, size = join()
    tokens = 4 + (faulty and rank == size - 1)
    table = torch.full((tokens, 2), float(rank))
    dist.broadcast(table, src=0)  # here
    return table.tolist()


@pair("dtype differs", 2, "mismatch")
def loss_from_numpy_is_double(faulty: bool) -> object:
    """One rank has its loss from a list of Python numbers through NumPy, and so in double precision."""
    rank, _ = join()
    losses = [0.5, 1.5]
    loss = torch.tensor(losses).sum()
    if rank == 1:
        loss = torch.from_numpy(torch.tensor(losses).double().numpy()).sum()
    if not faulty:
        loss = loss.float()
    dist.all_reduce(loss)  # here
    return loss.item()


@pair("dtype differs", 3, "mismatch", ranks=(0,))
def count_is_an_integer_on_rank_zero(faulty: bool) -> object:
    """Rank 0 counts its samples as an integer, the others divide theirs first."""
    rank, _ = join()
    samples = torch.tensor([8]) if faulty and rank == 0 else torch.tensor([8.0])
    dist.all_reduce(samples)  # here
    return float(samples.item())


@pair("dtype differs", 2, "mismatch")
def weights_in_half_precision_on_the_root(faulty: bool) -> object:
    """The root has loaded a checkpoint in bfloat16 and broadcasts it to ranks that hold float32."""
    rank, _ = join()
    weight = torch.full((4,), float(rank + 1))
    if faulty and rank == 0:
        weight = weight.bfloat16()
    dist.broadcast(weight, src=0)  # here
    return weight.tolist()


@pair("root differs", 2, "mismatch")
def every_rank_is_its_own_root(faulty: bool) -> object:
    """The source of a broadcast is the own rank instead of the one that has the seed."""
    rank, _ = join()
    seed = torch.tensor([42 + rank])
    dist.broadcast(seed, src=rank if faulty else 0)  # here
    return seed.item()


@pair("root differs", 3, "mismatch", ranks=(2,))
def reduced_to_the_wrong_rank(faulty: bool) -> object:
    """One rank believes that logs are kept by the last rank."""
    rank, size = join()
    logger = size - 1 if faulty and rank == size - 1 else 0
    loss = torch.tensor([float(rank)])
    dist.reduce(loss, dst=logger)  # here
    return loss.item() if rank == 0 else None


@pair("root differs", 3, "mismatch")
def rank_in_the_group_for_rank_in_the_world(faulty: bool) -> object:
    """One rank names the root by its place in the group, the other by its place in the world."""
    rank, _ = join()
    group = dist.new_group([1, 2])
    weight = torch.full((2,), float(rank))
    if rank == 1:
        dist.broadcast(weight, src=1, group=group)  # here
    if rank == 2:
        dist.broadcast(weight, group=group, group_src=1 if faulty else 0)  # here
    return weight.tolist()
