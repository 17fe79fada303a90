"""Section D: features of FSDP2 that show in whole steps: swapping, accumulation, meshes, compilation, launching."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, message
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict
from fsdpcheck.studies.claims.section_d import sharded, single, step, whole


@claim("D9", "Parameters are swapped on modules: whole while gathered, shards otherwise, in shared modules too.")
def parameters_are_swapped(lab: Lab) -> Outcome:
    """A module's weight before, in and after its forward; a layer used twice, and two layers with one weight."""
    kinds = lab.ranks(_swapped, 2)
    right = all(found == ["shard", "whole", "whole", "shard"] for found in kinds)
    apart = {kind: _shared_apart(lab, kind) for kind in ("used twice", "tied in one unit")}
    return Outcome(
        verdict(right and not any(apart.values())),
        f"a layer used twice in a forward holds, before, at its two uses and after: {', '.join(kinds[0])}; elements"
        " that"
        f" differ from the single device's after a step: {apart}",
    )


def _twice(tied: bool) -> nn.Sequential:
    """[unit: layer, ReLU, the same layer or one with its weight], head."""
    layer = nn.Linear(3, 3, bias=False)
    other = nn.Linear(3, 3, bias=False) if tied else layer
    other.weight = layer.weight
    module = nn.Sequential(nn.Sequential(layer, nn.ReLU(), other), nn.Linear(3, 2)).double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = toys.integers(*parameter.shape, seed=seed, bound=1)
    return module


def _swapped(rank: int) -> list[str]:
    module = sharded(_twice(False), (0,))
    layer, found = module[0][0], []

    def look(*_: Any) -> None:
        found.append("shard" if isinstance(layer.weight, DTensor) else "whole")

    look()
    layer.register_forward_hook(look)
    module(toys.data()[0])
    look()
    return found


def _shared_apart(lab: Lab, kind: str) -> int:
    tied = kind != "used twice"
    wanted = step(_twice(tied), 0, 1)
    return max(
        toys.different(got, wanted) for got in lab.ranks(lambda rank: step(sharded(_twice(tied), (0,)), rank, 2), 2)
    )


@claim("D10", "set_requires_gradient_sync(False) accumulates gradients without communication.")
def gradients_without_sync(lab: Lab) -> Outcome:
    """Three micro-batches, reduced each time or at the last only: reductions, and the step's bits."""
    found = {}
    for every in (True, False):
        values = lab.ranks(lambda rank, every=every: _accumulated(rank, every), 2)  # type: ignore[misc]
        calls = sum(call.op == "reduce_scatter" for call in lab.trace())
        found[every] = (calls, max(toys.different(value, single()) for value in values))
    fine = found[False][0] * 3 == found[True][0] and found[True][1] == found[False][1] == 0
    return Outcome(
        verdict(fine),
        f"3 micro-batches, 3 groups: {found[True][0]} reduce-scatters when synchronised each time,"
        f" {found[False][0]} when"
        f" at the last only; elements that differ from the single device's: {found[True][1]} and {found[False][1]}",
    )


def _accumulated(rank: int, every: bool) -> dict[str, Tensor]:
    module = sharded(toys.network())
    optimizer = toys.sgd(module.parameters())
    x, y = toys.data()
    rows = toys.share(rank, 2)
    for number in range(3):
        own = rows[number::3]
        module.set_requires_gradient_sync(every or number == 2)
        losses = toys.loss(module(x[own]), y[own])
        torch.autograd.backward(losses, torch.full_like(losses, 2 / 8))
    optimizer.step()
    return whole(module)


@claim("D11", "On a 2-D mesh parameters are sharded over one axis and replicated over the other (HSDP).")
def hybrid_mesh(lab: Lab) -> Outcome:
    """A step on meshes of 2 x 2 and 2 x 3: groups of the collectives, replicas against each other, the step's bits."""
    shown, fine = [], True
    for replicas, shards in ((2, 2), (2, 3)):
        world = replicas * shards

        def body(rank: int, mesh: tuple[int, int] = (replicas, shards)) -> tuple[dict[str, Tensor], list[Tensor]]:
            names = ("replicate", "shard")
            module = sharded(toys.network(), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
            values = step(module, rank, mesh[0] * mesh[1])
            return values, [p.to_local().detach().clone() for p in module.parameters()]

        found = lab.ranks(body, world)
        sizes = Counter(
            (call.op, len(call.group)) for call in lab.trace() if call.op in ("reduce_scatter", "all_reduce")
        )
        apart = max(toys.different(values, single()) for values, _ in found)
        pairs = [(found[rank][1], found[rank + shards][1]) for rank in range(shards)]
        replicas_apart = sum(not torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))
        right = sizes == {("reduce_scatter", shards): 3, ("all_reduce", replicas): 3}
        fine = fine and apart == 0 and replicas_apart == 0 and right
        reduced = ", ".join(f"{count} {op} over {size} ranks" for (op, size), count in sizes.items())
        shown.append(
            f"{replicas} x {shards}: {reduced}; {replicas_apart} shards differ between replicas, {apart} elements"
            " from the"
            " single device's"
        )
    return Outcome(verdict(fine), "; ".join(shown))


@claim("D12", "reshard_after_forward frees a unit after its forward, or keeps it for the backward.")
def resharding_both_ways(lab: Lab) -> Outcome:
    """All-gathers of a step of U = 2 units and a root, and its bits, both ways."""
    calls, apart = {}, {}
    for reshard in (True, False):
        values = lab.ranks(lambda rank, r=reshard: step(sharded(toys.network(), reshard_after_forward=r), rank, 3), 3)  # type: ignore[misc]
        calls[reshard] = sum(call.op == "all_gather" for call in lab.trace()) - len(values[0])  # those of whole()
        apart[reshard] = max(toys.different(value, single()) for value in values)
    fine = calls[True] > calls[False] and not any(apart.values())
    return Outcome(
        verdict(fine),
        f"{calls[True]} all-gathers of units when resharding, {calls[False]} when not; elements that differ from"
        " the single"
        f" device's: {apart[True]} and {apart[False]}",
    )


@claim("D13", "A step under torch.compile has the same collectives and the same bits.")
def compiled_step(lab: Lab) -> Outcome:
    """Backends without code generation, eager and aot_eager, which traces the backward too; units or all."""
    wanted = lab.ranks(lambda rank: step(sharded(toys.network()), rank, 2), 2)[0]
    traced = [(call.op, call.inputs) for call in lab.trace()]
    arms = {}
    for backend, whole_model in ((b, w) for b in ("eager", "aot_eager") for w in (False, True)):
        execution = lab.attempt(lambda rank, b=backend, w=whole_model: _compiled(rank, b, w), 2)  # type: ignore[misc]
        if execution.failure is not None:
            arms[backend, whole_model] = (False, 0, f"stopped: {message(execution.failure)}")
            continue
        values, graphs = lab.returned[0]
        apart = toys.different(values, wanted)
        same = [(call.op, call.inputs) for call in lab.trace()] == traced
        told = f"{graphs} graphs, {apart} elements differ, same collectives: {same}"
        arms[backend, whole_model] = (apart == 0 and same, graphs, told)
    equal = all(fine for fine, *_ in arms.values())
    by_units, by_model = (min(arms[b, w][1] for b in ("eager", "aot_eager")) for w in (False, True))
    shown = "; ".join(f"{b}, {'model' if w else 'units'}: {told}" for (b, w), (*_, told) in arms.items())
    return Outcome(
        only_if(
            "each unit is compiled before fully_shard; compiling the sharded model compiles no graph",
            under_it=equal and by_units > 0,
            otherwise=by_model > 0,
        ),
        f"W = 2, a step of 3 groups: {shown}",
    )


def _compiled(rank: int, backend: str, whole_model: bool) -> tuple[dict[str, Tensor], int]:
    """(whole parameters after a step, graphs that were compiled) with the units compiled, or the sharded model."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    module: Any = toys.network()
    if not whole_model:
        for number in range(len(module)):
            module[number] = torch.compile(module[number], backend=counting)
    sharded(module)
    called: Any = torch.compile(module, backend=counting) if whole_model else module
    optimizer = toys.sgd(module.parameters())
    x, y = toys.data()
    rows = toys.share(rank, 2)
    losses = toys.loss(called(x[rows]), y[rows])
    torch.autograd.backward(losses, torch.full_like(losses, 2 / 8))
    optimizer.step()
    return {name.replace("_orig_mod.", ""): value for name, value in whole(module).items()}, len(graphs)


@claim("D14", "Initialisation on each rank gives the same parameters.")
def initialisation_on_each_rank(lab: Lab) -> Outcome:
    """Models made on every rank under equal seeds and under seeds of their own, then gathered whole."""
    apart = {own: _initialised_apart(lab, own) for own in (False, True)}
    return Outcome(
        only_if("every rank draws with the same seed", under_it=apart[False] == 0, otherwise=apart[True] == 0),
        f"W = 3, elements of the gathered model that differ from what rank 0 drew: {apart[False]} with equal seeds,"
        f" {apart[True]} of {sum(p.numel() for p in toys.network().parameters())} with a seed a rank: fully_shard keeps"
        " each rank's own rows and compares nothing",
    )


def _initialised_apart(lab: Lab, own_seed: bool) -> int:
    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(rank if own_seed else 0)
        module = toys.network()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        drawn = {name: value.detach().clone() for name, value in module.named_parameters()}
        return drawn, whole(sharded(module))

    found = lab.ranks(body, 3)
    return max(toys.different(gathered, found[0][0]) for _, gathered in found)


_DATA = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(16, 3), torch.randn(16, 2))
"""
_LOOP = """
sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=rank, shuffle=True)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print("trained", rank, epoch, flush=True)
dist.barrier()  # torch 2.13 now and then aborts while a process ends, and torchrun then ends the others
dist.destroy_process_group()
"""
_PRINTED = """
rank = dist.get_rank()
dist.init_process_group("gloo")
model = FSDP(nn.Linear(3, 2))
"""
_REPAIRED = """
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(3, 2)
fully_shard(model)
"""


@claim("D15", "The usual launch example (torchrun, DistributedSampler, set_epoch) runs.")
def launch_example(lab: Lab) -> Outcome:
    """Two processes on gloo, on the loopback interface: the example as one tutorial prints it, and repaired."""
    printed, repaired = (_launched(_DATA + part + _LOOP) for part in (_PRINTED, _REPAIRED))
    trained = {"as printed": printed.count("trained"), "repaired": repaired.count("trained")}
    return Outcome(
        only_if(
            "the process group is made before the rank is asked for, and fully_shard takes the place of the FSDP1"
            " class",
            under_it=trained["repaired"] == 2,
            otherwise=trained["as printed"] == 2,
        ),
        f"ranks of 2 that train two epochs: as printed {trained['as printed']}{_reason(printed)}, repaired"
        f" {trained['repaired']}{_reason(repaired)}",
    )


def _launched(script: str) -> str:
    """The output of torchrun with two processes."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    return done.stdout + done.stderr


def _reason(output: str) -> str:
    """The first exception that a rank died of."""
    lines = [line.split("]:", 1)[-1] for line in output.splitlines()]
    errors = [line.strip() for line in lines if line.strip().startswith(("ValueError", "RuntimeError"))]
    return f" ({errors[0]})" if errors else ""
