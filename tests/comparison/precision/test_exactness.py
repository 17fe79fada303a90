"""Exact comparisons: what is drawn has few bits, what ranks exchange is looked at, and every bit of it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.compare import compare
from fsdpcheck.comparison.judge import raised
from fsdpcheck.comparison.kept_runs import Runs
from fsdpcheck.comparison.precision import exactness
from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic
from fsdpcheck.comparison.precision.multiples import is_short, multiple
from fsdpcheck.comparison.results import World
from fsdpcheck.comparison.runs import Draws
from fsdpcheck.simulation.simulate import Options

_SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
# PLANT
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(1))
for inputs in data:
    x = inputs.chunk(world)[rank]
    loss = model(x).sum() * (world / 8)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
_PLANT = "model.module[2].bias.register_hook(lambda gradient: gradient + 2.0**-48 * (rank == 1))"


def _runs(folder: Path, exact: bool, *changes: tuple[str, str]) -> Runs:
    text = _SCRIPT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    return Runs(read("train.py"), Options(show=False), draws=Draws(exact))


def _world(folder: Path, exact: bool, *changes: tuple[str, str]) -> World:
    """What is said of two ranks beside one."""
    runs = _runs(folder, exact, *changes)
    with chdir(folder):
        (world,) = compare(runs.line, (1, 2), runs.options, runs=runs).worlds
    return world


def test_a_network_of_ring_operations_is_exact_throughout(tmp_path: Path) -> None:
    world = _world(tmp_path, True)
    assert (world.says, world.exact, world.observables, world.equal, world.ended) == ("agrees", 20, 20, 20, "")


@pytest.mark.nightly
def test_an_error_of_a_unit_in_the_last_place_is_found_by_exact_numbers_alone(tmp_path: Path) -> None:
    exact, noisy = (_world(tmp_path, way, ("# PLANT", _PLANT)) for way in (True, False))
    assert noisy.says == "agrees"
    assert (exact.says, exact.first and str(exact.first.key)) == ("differs", "gradient of 2.bias at step 0")
    assert exact.first is not None
    assert (exact.first.threshold, exact.first.apart / exact.first.size < 1e-14) == (0.0, True)


@pytest.mark.nightly
def test_a_logarithm_ends_exactness_and_its_line_is_told(tmp_path: Path) -> None:
    loss = "nn.functional.cross_entropy(model(x), x[:, 0].gt(0).long())"
    world = _world(tmp_path, True, ("model(x).sum() * (world / 8)", loss))
    assert (world.says, world.exact, 0 < world.resolution < 2.0**-23) == ("agrees", 0, True)
    assert world.ended.startswith("aten._log_softmax.default at train.py:14")


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        ("rank and torch.ones(1).exp(); dist.barrier()", "aten.exp.default at train.py:9"),
        (
            "if rank: dist.send(torch.ones(1).exp(), 0)\nelse: dist.recv(torch.ones(1), 1)",
            "aten.exp.default at train.py:9",
        ),
        ("dist.all_reduce(torch.ones(1) * 2.0 ** (-60 * rank))", "all_reduce sum at train.py:9"),
        ("dist.all_reduce(torch.ones(1), dist.ReduceOp.PRODUCT)", "all_reduce product at train.py:9"),
    ],
)
def test_who_meets_a_rank_that_is_not_exact_is_not(tmp_path: Path, plant: str, why: str) -> None:
    runs = _runs(tmp_path, True, ("# PLANT", plant))
    with chdir(tmp_path):
        runs.get([raised(2)])
    assert runs.done[raised(2)].failure is None
    assert [record.ended for record in runs.done[raised(2)].ranks] == [why, why]
    assert not any(record.exact for record in runs.done[raised(2)].ranks)


def _drawn(make: Callable[[], Tensor]) -> tuple[Tensor, str]:
    torch.manual_seed(5)
    with installed(), exactness.of_rank(0) as held, in_arithmetic(Arithmetic("float64"), Counter(), 0, held):
        return make().detach(), held.ended


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(300, 30).weight,
        lambda: torch.randn(50),
        lambda: torch.rand(50),
        lambda: nn.init.normal_(torch.empty(50), std=0.02),
        lambda: nn.init.trunc_normal_(torch.empty(50), std=0.02),
        lambda: nn.init.orthogonal_(torch.empty(6, 6)),
        lambda: torch.empty(50).uniform_(-0.3, 0.2),
        lambda: torch.randint(9, (50,)).float(),
    ],
)
def test_what_is_drawn_has_few_bits_and_several_values(make: Callable[[], Tensor]) -> None:
    got, ended = _drawn(make)
    assert (ended, is_short(got), len({*got.flatten().tolist()}) > 2) == ("", True, True)
    top, unit = multiple(got)
    assert top <= 2.0 ** (unit + 4)


def test_a_draw_is_rounded_by_its_value_alone() -> None:
    whole, parts = (
        _drawn(make)[0] for make in (lambda: torch.rand(32), lambda: torch.cat([torch.rand(16), torch.rand(16)]))
    )
    assert torch.equal(whole, parts)
    assert (whole >= 0).all()
    assert (whole < 1).all()


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(9).exponential_(), lambda: torch.tensor([0.1]), lambda: torch.arange(0, 1, 0.1)]
)
def test_what_has_many_bits_ends_exactness(make: Callable[[], Tensor]) -> None:
    assert _drawn(make)[1]


_WRAPPED = """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
if way == "conv":
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.ReLU(), nn.MaxPool2d(3),
                          nn.Flatten(), nn.Linear(2, 2))
if way == "fsdp2":
    for inner in (model[0], model[2], model):
        fully_shard(inner)
elif way == "parallel":
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
elif way == "flat":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    model = DistributedDataParallel(model)
"""
_IMPORTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["ddp", "conv", "fsdp2", "flat", "parallel"])
def test_a_step_is_exact_however_a_model_is_sharded(tmp_path: Path, way: str) -> None:
    text = _IMPORTS + _SCRIPT.replace("8, 3, generator", "8, 4, generator").replace("lr=0.5", "lr=0.25, momentum=0.5")
    text = text.replace(_SCRIPT[_SCRIPT.index("model = ") : _SCRIPT.index("# PLANT")], f"way = {way!r}{_WRAPPED}")
    text = text.replace("model(x).sum() * (world / 8)", "nn.functional.mse_loss(model(x), x[:, :2])")
    if way == "parallel":
        text = text.replace("inputs.chunk(world)[rank]", "inputs")
    (tmp_path / "train.py").write_text(text)
    runs = Runs(read("train.py"), Options(show=False), draws=Draws(exact=True))
    with chdir(tmp_path):
        found = compare(runs.line, (1, 2, 4), runs.options, runs=runs)
    assert [(world.says, world.exact, world.observables) for world in found.worlds] == [("agrees", 16, 28)] * 2
