"""One rank that runs alone calls what it calls among all of them, with values and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.simulate import Options, Simulation, simulate_script

_BEGIN = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
W, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
"""
_TRAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(3, 8)).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
_WITHOUT_CLIPPING = _TRAIN.replace("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass")
PROGRAMS = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model)" + _TRAIN,
    "fully_shard": "from torch.distributed.fsdp import fully_shard\nfully_shard(model[0]); fully_shard(model)" + _TRAIN,
    "hsdp": """
from torch.distributed.fsdp import fully_shard
mesh = dist.init_device_mesh("cpu", (2, W // 2), mesh_dim_names=("replicate", "shard"))
fully_shard(model[0], mesh=mesh); fully_shard(model, mesh=mesh)
"""
    + _TRAIN,
    "fsdp1": """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
"""
    + _WITHOUT_CLIPPING,
    "tensor_parallel": """
from torch.distributed.tensor import parallel as tp
mesh = dist.init_device_mesh("cpu", (W,))
model = tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
"""
    + _TRAIN,
    "calls": """
x = torch.ones(4 * W)
dist.all_reduce(x, dist.ReduceOp.MAX)
dist.reduce(x, 0)
dist.broadcast(x, 0)
pieces = [torch.zeros(4) for _ in range(W)]
dist.all_gather(pieces, x[:4].clone())
dist.reduce_scatter(torch.zeros(4), list(x.chunk(W)), dist.ReduceOp.AVG)
dist.gather(x[:4].clone(), pieces if rank == 0 else None, 0)
dist.scatter(torch.zeros(4), list(x.chunk(W)) if rank == 0 else None, 0)
dist.all_to_all_single(torch.zeros(4 * W), x)
dist.barrier()
half = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(x, group=half, async_op=True).wait()
if rank == 0:
    dist.send(x, 1)
    dist.recv(x, 1)
elif rank == 1:
    dist.recv(x, 0)
    dist.send(x, 0)
print(float(x[0]))
""",
}


def ran(folder: Path, name: str, ranks: int, options: Options) -> Simulation:
    file = folder / "program.py"
    file.write_text(_BEGIN + PROGRAMS.get(name, name) + "\ndist.destroy_process_group()\n", encoding="utf-8")
    return simulate_script(script.of_file(file, []), ranks, options)


def calls(done: Simulation) -> list[Collective]:
    assert done.failure is None, done.failure.text
    return list(done.traces[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_calls_what_it_calls_among_all(name: str, ranks: int, tmp_path: Path) -> None:
    among = calls(ran(tmp_path, name, ranks, Options(show=False)))
    assert len(among) > 3
    assert calls(ran(tmp_path, name, 1, Options(show=False, alone_of=ranks))) == among


@pytest.mark.parametrize("name", ["fully_shard", "tensor_parallel", "calls"])
def test_it_calls_the_same_where_tensors_have_no_values(name: str, tmp_path: Path) -> None:
    among = calls(ran(tmp_path, name, 4, Options(show=False)))
    done = ran(tmp_path, name, 1, Options(show=False, alone_of=4, without_values=True))
    assert calls(done) == among
    assert done.made_up


def test_it_is_the_first_of_thousands(tmp_path: Path) -> None:
    program = """
import os
x = torch.ones(2)
dist.all_reduce(x)
pieces = torch.zeros(2 * W)
dist.all_gather_into_tensor(pieces, x)
print(rank, W, os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"], x.tolist(), float(pieces.sum()))
"""
    done = ran(tmp_path, program, 1, Options(show=False, alone_of=4096, per_node=8))
    assert len(calls(done)) == 2
    assert done.printed == ("0 4096 8 512 [4096.0, 4096.0] 33554432.0\n",)


def test_steps_are_those_of_the_optimizer_that_stepped_first(tmp_path: Path) -> None:
    program = """
ours, theirs = torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[2].parameters())
for step in range(3):
    dist.barrier()
    model(torch.ones(3, 8)).sum().backward()
    theirs.step()
    ours.step()
    dist.barrier()
"""
    assert ran(tmp_path, program, 1, Options(show=False, alone_of=64)).steps == (1, 3, 5)
    assert ran(tmp_path, program, 2, Options(show=False)).steps == ()


def test_what_is_asked_of_a_tensor_without_values_is_told_with_its_line(tmp_path: Path) -> None:
    program = (
        "loss = model(torch.ones(3, 8)).sum()\nfor _ in range(3):\n    print(loss.item(), int(torch.arange(5)[3]))"
    )
    done = ran(tmp_path, program, 1, Options(show=False, alone_of=64, without_values=True))
    ((place, times),) = done.made_up
    assert (done.printed, times) == (("1.0 3\n" * 3,), 3)
    assert place.endswith(".py:12")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("dist.distributed_c10d._get_default_store().get('from rank 1')", "store.get"),
        ("dist.distributed_c10d._get_default_store().wait(['from rank 1'])", "store.get"),
    ],
)
def test_who_waits_for_more_of_another_than_calls_is_not_kept_waiting(program: str, said: str, tmp_path: Path) -> None:
    failure = ran(tmp_path, program, 1, Options(show=False, alone_of=64)).failure
    assert failure is not None
    assert failure.kind == "adapter"
    assert "rank 0 runs alone, as the first of 64" in failure.text
    assert said in failure.text
    assert ".py:10" in failure.text


def test_a_functional_collective_without_a_form_is_named(tmp_path: Path) -> None:
    program = (
        "torch.ops._c10d_functional.batch_p2p_ops(['isend'], [1], [0], [torch.ones(2)], dist.group.WORLD.group_name)"
    )
    failure = ran(tmp_path, program, 1, Options(show=False, alone_of=4, without_values=True)).failure
    assert failure is not None
    assert "this functional collective has no form without values" in failure.text
    assert "batch_p2p_ops" in failure.text


@pytest.mark.parametrize("values", [True, False])
def test_bytes_are_those_of_the_tensors_that_travel(values: bool, tmp_path: Path) -> None:
    program = """
dist.all_to_all_single(torch.empty(2 * W), torch.ones(2 * W))
dist.all_gather([torch.empty(3) for _ in range(W)], torch.ones(3))
dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
dist.scatter(torch.empty(7), None, 1)
dist.send(torch.ones(2), 1)
dist.recv(torch.ones(2), 1)
"""
    done = ran(tmp_path, program, 1, Options(show=False, alone_of=8, without_values=not values))
    assert done.failure is None, done.failure.text
    assert done.payloads == (64, 96, 10, 224, 8, 8)


def test_a_sparse_gradient_has_bytes_of_indices_and_values(tmp_path: Path) -> None:
    program = """
layer = nn.Embedding(10, 4, sparse=True)
layer(torch.tensor([1, 2])).sum().backward()
dist.all_reduce(layer.weight.grad)
"""
    assert ran(tmp_path, program, 1, Options(show=False, alone_of=8)).payloads == (2 * 8 + 2 * 4 * 4,)


def test_ordinary_scripts_go_on_without_values(tmp_path: Path) -> None:
    program = """
dist.barrier()
model.to(torch.bfloat16).to(torch.float32)
loss = model(torch.ones(3, 8)).sum()
if torch.isnan(loss) or not torch.isfinite(loss) or torch.isinf(model[0].weight).any():
    raise SystemExit("not finite")
told = [{"loss": 1, "rank": rank}]
dist.broadcast_object_list(told)
found = [None] * W
dist.all_gather_object(found, told)
print(f"{loss:.2f}", found[0], torch.full((2,), 5)[0].item(), torch.tril_indices(3, 3).sum().item())
"""
    done = ran(tmp_path, program, 1, Options(show=False, alone_of=4, without_values=True))
    assert done.failure is None, done.failure.text
    assert done.printed == ("1.00 [{'loss': 1, 'rank': 0}] 5 12\n",)


def test_no_checkpoint_is_overwritten_by_one_without_values(tmp_path: Path) -> None:
    kept = tmp_path / "model.pt"
    kept.write_text("weights")
    program = f"torch.save(model.state_dict(), {str(kept)!r})"
    failure = ran(tmp_path, program, 1, Options(show=False, alone_of=4, without_values=True)).failure
    assert failure is not None
    assert "torch.save of tensors that have no values" in failure.text
    assert kept.read_text() == "weights"
