"""Frozen pairs: data parallel and sharded training, its data, decisions, checkpoints and ends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.communication.pairs import join, pair


@pair("data parallel", 2, "deadlock", ranks=(1,))
def layer_frozen_on_one_rank_after_wrapping(faulty: bool) -> object:
    """One rank freezes a layer of a model that is already wrapped: its gradient never becomes ready."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)))
    for weight in model.parameters():
        nn.init.ones_(weight)
    if faulty and rank == 1:
        model.module[0].weight.requires_grad_(False)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return model.module[1].weight.grad.tolist()


@pair("data parallel", 2, "mismatch")
def one_rank_looks_for_unused_parameters(faulty: bool) -> object:
    """Only one rank reduces which parameters were used."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), find_unused_parameters=rank == 1 or not faulty)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return model.module.weight.grad.tolist()


@pair("data parallel", 2, "mismatch")
def two_models_used_in_another_order(faulty: bool) -> object:
    """A generator and a discriminator of another size are trained in another order on one rank."""
    rank, _ = join()
    models = [DistributedDataParallel(nn.Linear(inputs, 1, bias=False)) for inputs in (2, 3)]
    order = list(models)
    if faulty and rank == 1:
        order.reverse()
    for model in order:
        model(torch.full((1, model.module.in_features), float(rank + 1))).sum().backward()  # here
    return [model.module.weight.grad.tolist() for model in models]


@pair("sharded parameters", 2, "deadlock", ranks=(0,))
def histogram_of_a_gradient_on_rank_zero(faulty: bool) -> object:
    """Rank 0 logs the largest entry of a gradient, whose shards it has to gather for that."""
    rank, size = join()
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model(torch.full((1, 2), 2.0)).sum().backward()
    if faulty:
        return model.weight.grad.full_tensor().max().item() if rank == 0 else None  # here
    largest = model.weight.grad.full_tensor().max().item()
    return largest if rank == 0 else None


@pair("sharded parameters", 2, "deadlock", ranks=(0,))
def full_state_dict_on_rank_zero(faulty: bool) -> object:
    """The state for a checkpoint is gathered under ``if rank == 0``."""
    rank, size = join()
    model = nn.Sequential(nn.Linear(2, 4, bias=False))
    nn.init.ones_(model[0].weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    if rank == 0 or not faulty:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # here
    return state["0.weight"].tolist() if rank == 0 else None


@pair("sharded parameters", 2, "mismatch")
def placed_otherwise_on_one_rank(faulty: bool) -> object:
    """One rank takes a tensor apart where the other copies it."""
    rank, size = join()
    mesh = init_device_mesh("cpu", (size,))
    placement = Replicate() if faulty and rank == 1 else Shard(0)
    tensor: DTensor = distribute_tensor(torch.arange(4.0) + rank, mesh, [placement])  # here
    total = tensor.to_local().sum()
    dist.all_reduce(total)
    return total.item()


@pair("rank-0 branch", 2, "deadlock", ranks=(0,))
def length_that_is_a_collective(faulty: bool) -> object:
    """The length of a sharded data set is a reduction, and rank 0 prints it."""
    rank, _ = join()

    class Sharded:
        def __len__(self) -> int:
            rows = torch.tensor([3 + rank])
            dist.all_reduce(rows)  # here
            return int(rows)

    data = Sharded()
    if faulty:
        return f"{len(data)} rows" if rank == 0 else None  # here
    rows = len(data)
    return f"{rows} rows" if rank == 0 else None


@pair("rank-0 branch", 2, "deadlock", ranks=(0,))
def objects_gathered_for_the_log_of_rank_zero(faulty: bool) -> object:
    """Rank 0 gathers everybody's time under its own condition."""
    rank, size = join()
    times: list[object] = [None] * size
    if rank == 0 or not faulty:
        dist.all_gather_object(times, {"rank": rank})  # here
    return times if rank == 0 else None


@pair("rank-0 branch", 2, "deadlock", ranks=(0,))
def optimizer_state_consolidated_by_rank_zero(faulty: bool) -> object:
    """The state of a sharded optimizer is collected on rank 0, but only rank 0 asks for it."""
    rank, _ = join()
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.5, momentum=0.5)
    sum((weight * (rank + 1)).sum() for weight in weights).backward()
    optimizer.step()
    if rank == 0 or not faulty:
        optimizer.consolidate_state_dict(to=0)  # here
    return len(optimizer.state_dict()["state"]) if rank == 0 else None


@pair("uneven data", 2, "deadlock", ranks=(1,))
def empty_draw_not_yielded(faulty: bool) -> object:
    """A sampler yields nothing where its draw is empty, and its rank takes a step less."""
    rank, _ = join()
    draws = [[1.0, 2.0], [3.0], [4.0]] if rank == 0 else [[5.0], [], [6.0]]
    steps = 0
    for draw in (draw for draw in draws if draw or not faulty):
        gradient = torch.tensor(draw).sum()
        dist.all_reduce(gradient)  # here
        steps += 1
    return steps


@pair("uneven data", 3, "deadlock", ranks=(2,))
def evaluation_until_the_data_ends(faulty: bool) -> object:
    """Evaluation gathers each batch's scores until the rank's own data is at its end."""
    rank, size = join()
    rows = [float(rank)] * (3 if rank < 2 else 2)
    most = torch.tensor([len(rows)])
    dist.all_reduce(most, op=dist.ReduceOp.MIN)
    scores = 0.0
    for row in rows if faulty else rows[: int(most)]:
        parts = torch.empty(size)
        dist.all_gather_into_tensor(parts, torch.tensor([row]))  # here
        scores += parts.sum().item()
    return scores


@pair("local decision", 2, "deadlock", ranks=(1,))
def iterates_until_the_own_residual_is_small(faulty: bool) -> object:
    """A solver stops where the residual of the own block is small enough, and each iteration reduces."""
    rank, _ = join()
    residual, iterations, left = 8.0 / 4**rank, 0, 1.0
    while left > 0.5:
        total = torch.tensor([residual])
        dist.all_reduce(total)  # here
        residual /= 2
        iterations += 1
        left = residual if faulty else total.item()
    return iterations


@pair("local decision", 2, "mismatch")
def dense_or_sparse_by_the_own_density(faulty: bool) -> object:
    """A gradient is gathered by its indices where it is sparse, and reduced where it is dense."""
    rank, size = join()
    gradient = torch.tensor([1.0, 0.0, 0.0, 0.0]) if rank == 0 else torch.ones(4)
    density = (gradient != 0).float().mean()
    if not faulty:
        dist.all_reduce(density, op=dist.ReduceOp.MAX)
    if density.item() > 0.5:
        dist.all_reduce(gradient)  # here
        return gradient.tolist()
    pieces: list[object] = [None] * size
    dist.all_gather_object(pieces, gradient.nonzero().tolist())  # here
    return pieces


@pair("checkpoint", 2, "mismatch")
def resumed_where_a_file_is(faulty: bool) -> object:
    """Only the first machine has a checkpoint on its disk: it tells its step, the other begins to train."""
    rank, _ = join()
    on_disk = {0: {"step": 5}}
    step, loss = torch.zeros(2), torch.tensor([float(rank)])
    if rank in on_disk:
        step += on_disk[rank]["step"]
    if rank in on_disk or not faulty:
        dist.broadcast(step, src=0)  # here
    dist.all_reduce(loss)  # here
    return [*step.tolist(), loss.item()]


@pair("early exit", 2, "exited", "deadlock", ranks=(1,))
def refuses_its_configuration(faulty: bool) -> object:
    """A rank with a wrong option says so and leaves, after the others have begun."""
    rank, _ = join()
    options = {"batch": 0 if faulty and rank == 1 else 2}
    if options["batch"] < 1:
        raise SystemExit("batch has to be positive")  # here
    rows = torch.tensor([options["batch"]])
    dist.all_reduce(rows)  # here
    return rows.item()


@pair("exception", 2, "mismatch")
def failure_told_from_the_handler(faulty: bool) -> object:
    """Whoever fails tells the others by a reduction, which those who do not fail never make."""
    rank, _ = join()
    loss, failed = torch.zeros(1), torch.tensor([0, 1])
    try:
        loss += float("1.5" if rank == 0 else "none")
        failed[1] = 0
    except ValueError:
        if faulty:
            dist.all_reduce(failed)  # here
    if not faulty:
        dist.all_reduce(failed)
    dist.all_reduce(loss)  # here
    return [*failed.tolist(), loss.item()]
