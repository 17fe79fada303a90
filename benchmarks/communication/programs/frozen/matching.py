"""Frozen pairs: calls that meet and disagree, or that one rank does not make."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.communication.pairs import join, pair


@pair("op type differs", 3, "mismatch", ranks=(1,))
def one_rank_reduces_where_the_others_scatter(faulty: bool) -> object:
    """One rank still runs the code of an unsharded optimizer and reduces the whole gradient."""
    rank, size = join()
    gradient, shard = torch.arange(float(size)) + rank, torch.empty(1)
    if faulty and rank == 1:
        dist.all_reduce(gradient)  # here
        return gradient[rank].item()
    dist.reduce_scatter_tensor(shard, gradient)  # here
    return shard.item()


@pair("op type differs", 2, "mismatch")
def gather_meets_gather_of_all(faulty: bool) -> object:
    """Rank 0 gathers predictions to itself, the other rank gathers them to all."""
    rank, size = join()
    mine = torch.tensor([float(rank)])
    parts = [torch.zeros(1) for _ in range(size)]
    if faulty and rank == 1:
        dist.all_gather(parts, mine)  # here
    else:
        dist.gather(mine, parts if rank == 0 else None, dst=0)  # here
    return torch.cat(parts).tolist() if rank == 0 else None


@pair("reduction differs", 3, "mismatch", ranks=(0,))
def smallest_on_the_rank_that_logs(faulty: bool) -> object:
    """The rank that logs asks for the smallest loss, the others contribute to the sum."""
    rank, _ = join()
    loss = torch.tensor([float(rank + 1)])
    reduction = dist.ReduceOp.MIN if faulty and rank == 0 else dist.ReduceOp.SUM
    dist.reduce(loss, dst=0, op=reduction)  # here
    return loss.item() if rank == 0 else None


@pair("shape differs", 3, "mismatch", ranks=(1,))
def sequences_padded_to_the_own_longest(faulty: bool) -> object:
    """Each rank pads its sequences to the longest that it has itself."""
    rank, size = join()
    lengths = [4, 3, 4]
    tokens = torch.full((2, lengths[rank] if faulty else max(lengths)), rank)
    batches = [torch.empty_like(tokens) for _ in range(size)]
    dist.all_gather(batches, tokens)  # here
    return [batch.tolist() for batch in batches]


@pair("dtype differs", 2, "mismatch")
def mask_of_booleans_meets_bytes(faulty: bool) -> object:
    """One rank's mask comes from a comparison, the other's from a file of bytes."""
    rank, size = join()
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    if faulty and rank == 0:
        mask = mask > 0
    masks = torch.empty(3 * size, dtype=mask.dtype)
    dist.all_gather_into_tensor(masks, mask)  # here
    return masks.int().tolist()


@pair("root differs", 3, "mismatch")
def best_rank_by_the_own_scores(faulty: bool) -> object:
    """Each rank takes for the best the one that scores highest in its own notes, and expects the weights from it."""
    rank, _ = join()
    scores = torch.tensor([[1, 2, 6], [5, 4, 2], [1, 3, 2]][rank])
    if not faulty:
        dist.all_reduce(scores)
    best = int(scores.argmax())
    weights: list[object] = [f"weights of {rank}"]
    dist.broadcast_object_list(weights, src=best)  # here
    return weights


@pair("parameter matching", 2, "mismatch")
def lists_of_objects_of_another_length(faulty: bool) -> object:
    """The root broadcasts a configuration and a vocabulary, the other rank expects the configuration alone."""
    rank, _ = join()
    objects: list[object] = ["config", "vocabulary"] if rank == 0 else [None, None]
    if faulty and rank == 1:
        objects.pop()
    dist.broadcast_object_list(objects, src=0)  # here
    return objects


@pair("parameter matching", 3, "mismatch", ranks=(2,))
def one_rank_gathers_another_shard(faulty: bool) -> object:
    """The last rank forgot to pad its shard to the size of the others."""
    rank, size = join()
    rows = [2, 2, 1][rank]
    shard = torch.full((rows if faulty else 2,), float(rank))
    full = torch.empty(size * shard.numel())
    dist.all_gather_into_tensor(full, shard)  # here
    return full.tolist()


@pair("call ordering", 2, "mismatch")
def weights_gathered_before_gradients_are_scattered(faulty: bool) -> object:
    """One rank prefetches the weights of the next layer before it scatters the gradient of this one."""
    rank, size = join()
    shard, full = torch.tensor([float(rank)]), torch.empty(size)
    gradient, reduced = torch.ones(size), torch.empty(1)
    if faulty and rank == 1:
        dist.all_gather_into_tensor(full, shard)  # here
        dist.reduce_scatter_tensor(reduced, gradient)
    else:
        dist.reduce_scatter_tensor(reduced, gradient)  # here
        dist.all_gather_into_tensor(full, shard)
    return [*full.tolist(), reduced.item()]


@pair("call ordering", 2, "mismatch")
def metrics_in_the_order_of_a_dictionary(faulty: bool) -> object:
    """Metrics are reduced as each rank came to know them: rank 1 saw an accuracy before a confusion matrix."""
    rank, _ = join()
    metrics = {"confusion": torch.eye(2) * (rank + 1), "accuracy": torch.tensor([float(rank)])}
    if rank == 1:
        metrics = dict(reversed(metrics.items()))
    for name in metrics if faulty else sorted(metrics):
        dist.all_reduce(metrics[name])  # here
    return [metrics["accuracy"].item(), metrics["confusion"].tolist()]


@pair("call skipped", 2, "deadlock", ranks=(1,))
def answer_remembered_on_one_rank(faulty: bool) -> object:
    """A length that is agreed on by a reduction is remembered; one rank remembers it from its warm-up."""
    rank, _ = join()
    remembered = {"train": 7} if faulty and rank == 1 else {}
    if "train" not in remembered:
        length = torch.tensor([7 - rank])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)  # here
        remembered["train"] = int(length)
    return remembered["train"]


@pair("same shape, other order", 2, "mismatch")
def full_weights_asked_for_in_another_order(faulty: bool) -> object:
    """Ranks walk the weights of a sharded model by another order of their names."""
    rank, size = join()
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for at, weight in enumerate(model.parameters()):
        nn.init.constant_(weight, at + 1.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    names = sorted(name for name, _ in model.named_parameters())
    if faulty and rank == 1:
        names.reverse()
    full = {name: model.get_parameter(name).full_tensor() for name in names}  # here
    return [full[name].sum().item() for name in sorted(full)]


@pair("same shape, other order", 2, "mismatch")
def shards_gathered_in_another_order(faulty: bool) -> object:
    """Two equal layers are unsharded before the forward, and one rank prefetches the second first."""
    rank, size = join()
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for at, weight in enumerate(model.parameters()):
        nn.init.constant_(weight, at + 1.0)
    shards = {name: weight.detach().flatten().chunk(3)[rank] for name, weight in model.named_parameters()}
    order = sorted(shards, reverse=faulty and rank == 1)
    for name in order:
        full = torch.empty(size * shards[name].numel())
        dist.all_gather_into_tensor(full, shards[name])  # here
        model.get_parameter(name).data = full
    return [weight.sum().item() for weight in model.parameters()]


@pair("barriers", 2, "deadlock")
def barrier_of_the_node_meets_barrier_of_the_world(faulty: bool) -> object:
    """One rank waits for its node, the other for the world, which are the same ranks and other groups."""
    rank, size = join()
    node = dist.new_group(list(range(size)))
    dist.barrier(group=node if faulty and rank == 1 else None)  # here
    return rank
