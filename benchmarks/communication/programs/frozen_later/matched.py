"""Calls that meet and disagree, and groups in which they meet."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.communication.pairs import join, pair


@pair("op type differs", 2, "mismatch", "deadlock")
def tensor_meets_the_length_of_an_object(faulty: bool) -> object:
    """A gather of objects begins with a gather of their lengths, and a count of the other rank meets that."""
    rank, size = join()
    if faulty and rank == 1:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([rank]))  # here
        return len(counts)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})  # here
    return len(objects)


@pair("reduction differs", 2, "mismatch")
def largest_and_sum_of_functional_reductions(faulty: bool) -> object:
    """One rank asks for the largest shard of the sums, in a functional collective that is used much later."""
    rank, size = join()
    gradient = torch.arange(4.0) + rank
    reduction = "max" if faulty and rank == 1 else "sum"
    shard = functional.reduce_scatter_tensor(gradient, reduction, 0, list(range(size)))  # here
    return (shard + 1.0).tolist()  # here


@pair("shape differs", 3, "mismatch", ranks=(1,))
def lists_of_shares_of_another_length(faulty: bool) -> object:
    """Shares of a gradient are scattered by a list; one rank cuts its own of a shorter gradient."""
    rank, size = join()
    width = 2 if faulty and rank == 1 else 3
    shares = list(torch.full((size * width,), float(rank)).chunk(size))
    mine = torch.empty(width)
    dist.reduce_scatter(mine, shares)  # here
    return mine.sum().item()


@pair("dtype differs", 2, "mismatch")
def tokens_of_half_the_width(faulty: bool) -> object:
    """Routed tokens are bfloat16 on the rank that casts its router, and float16 on the other: as many bytes."""
    rank, size = join()
    kind = torch.bfloat16 if faulty and rank == 1 else torch.float16
    tokens, routed = torch.full((size,), float(rank + 1), dtype=kind), torch.empty(size, dtype=kind)
    dist.all_to_all_single(routed, tokens)  # here
    return routed.float().tolist()


@pair("root differs", 3, "mismatch")
def both_members_gather_to_themselves(faulty: bool) -> object:
    """The logger of a group is named by its rank in the world on one member, and by its place on the other."""
    rank, size = join()
    group = dist.new_group([1, 2])
    mine = torch.tensor([float(rank)])
    parts = [torch.empty(1) for _ in range(size - 1)]
    if rank == 1:
        dist.gather(mine, parts, dst=1, group=group)  # here
    if rank == 2 and faulty:
        dist.gather(mine, parts, group_dst=1, group=group)  # here
    elif rank == 2:
        dist.gather(mine, group_dst=0, group=group)
    return [part.item() for part in parts] if rank == 1 else None


@pair("parameter matching", 3, "mismatch")
def splits_the_wrong_way_round(faulty: bool) -> object:
    """Counts of what comes and of what goes are swapped in the call on one rank."""
    rank, size = join()
    counts = torch.tensor([[1, 2, 0], [0, 1, 2], [2, 1, 1]])
    going, coming = counts[rank].tolist(), counts[:, rank].tolist()
    if faulty and rank == 0:
        going, coming = coming, going
    tokens, routed = torch.full((sum(going),), float(rank)), torch.empty(sum(coming))
    dist.all_to_all_single(routed, tokens, coming, going)  # here
    return [routed.tolist(), size]


@pair("same shape, other order", 2, "mismatch")
def experts_in_the_order_of_a_dictionary(faulty: bool) -> object:
    """Experts of equal shape are registered in the order of each rank's configuration, and reduced in that."""
    rank, _ = join()
    names = ["code", "text"] if rank == 0 or not faulty else ["text", "code"]
    experts = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    for name, expert in experts.items():
        nn.init.constant_(expert.weight, float(len(name) + (name == "text") + rank))
        expert(torch.ones(1, 2) * (1.0 + (name == "text"))).sum().backward()
    for weight in experts.parameters():
        dist.all_reduce(weight.grad)  # here
    return [experts[name].weight.grad.sum().item() for name in ("code", "text")]


@pair("call ordering", 2, "mismatch")
def metric_begun_early_on_one_rank(faulty: bool) -> object:
    """One rank begins the reduction of its metric early to hide it, and so before the others' gradient."""
    rank, _ = join()
    gradient, metric, work = torch.full((3,), float(rank)), torch.tensor([1.0, 2.0]), None
    if faulty and rank == 1:
        work = dist.all_reduce(metric, async_op=True)  # here
    dist.all_reduce(gradient)  # here
    if work is None:
        work = dist.all_reduce(metric, async_op=True)
    work.wait()
    return [gradient.tolist(), metric.tolist()]


@pair("call skipped", 2, "deadlock", ranks=(1,))
def names_paired_with_a_shorter_list(faulty: bool) -> object:
    """``zip`` stops at the shorter list: one rank's configuration has no scale for the last layer."""
    rank, _ = join()
    layers = [torch.full((2,), float(rank + at)) for at in range(3)]
    scales = [1.0, 2.0] if faulty and rank == 1 else [1.0, 2.0, 4.0]
    works = []
    for layer, scale in zip(layers, scales, strict=False):
        works.append(dist.all_reduce(layer.mul_(scale), async_op=True))  # here
    for work in reversed(works):
        work.wait()  # here
    return [layer.sum().item() for layer in layers]


@pair("invalid parameter", 4, "raised")
def root_by_its_place_in_the_group(faulty: bool) -> object:
    """The source of a broadcast in a group is a rank of the world; 0 is not in the second half."""
    rank, size = join()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    value = torch.tensor([float(rank)])
    if faulty:
        dist.broadcast(value, src=0, group=halves[rank // 2])  # here
    else:
        dist.broadcast(value, group_src=0, group=halves[rank // 2])
    return [value.item(), size]


@pair("group construction", 4, "deadlock")
def neighbours_make_their_groups_in_a_circle(faulty: bool) -> object:
    """Groups that only their members make are made in a circle, each rank with its right neighbour first."""
    rank, size = join()
    places = [rank, (rank - 1) % size]
    value = torch.tensor([float(rank + 1)])
    groups = {}
    for at in places if faulty else sorted(places, key=lambda at: at % 2):
        members = sorted([at, (at + 1) % size])
        groups[at] = dist.new_group(members, use_local_synchronization=True)  # here
    for at in sorted(groups, key=lambda at: at % 2):
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=groups[at])
    return value.item()


@pair("several groups", 4, "deadlock", ranks=(1,))
def gradient_awaited_before_the_reduction(faulty: bool) -> object:
    """Two replicas of two stages: reductions of a stage and messages of a replica wait in a circle of four."""
    rank, _ = join()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    value, moved = torch.tensor([float(rank)]), torch.zeros(1)
    if rank == 1 and faulty:
        dist.recv(moved, src=3)  # here
    if rank == 2:
        dist.recv(moved, src=0)  # here
    dist.all_reduce(value, group=stages[rank // 2])  # here
    if rank == 0:
        dist.send(value, dst=2)
    if rank == 3:
        dist.send(value, dst=1)
    if rank == 1 and not faulty:
        dist.recv(moved, src=3)
    return [value.item(), moved.item()]


@pair("barriers", 4, "deadlock", ranks=(1,))
def barrier_of_the_world_in_place_of_the_own_half(faulty: bool) -> object:
    """Each half has as many barriers as it has rounds; one rank forgets the group in one of them."""
    rank, _ = join()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(1 + 2 * (rank // 2)):
        dist.barrier(group=None if faulty and rank == 1 else halves[rank // 2])  # here
    dist.barrier()  # here
    return rank


@pair("device mesh", 4, "deadlock", "mismatch", ranks=(0,))
def mesh_flattened_for_the_log(faulty: bool) -> object:
    """To reduce its loss over all dims, rank 0 flattens the mesh where it logs, which makes a group."""
    rank, _ = join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loss = torch.tensor([float(rank)])
    if rank == 0 or not faulty:
        everyone = mesh[("dp", "tp")]._flatten("all")  # here
        dist.all_reduce(loss, group=everyone.get_group())  # here
    return loss.item()
