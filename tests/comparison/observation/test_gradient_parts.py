"""Each rank's own part of a gradient: they add up to the gradient, however it is reduced and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdpcheck.comparison.contributions import parts_of
from tests.comparison.observation.observing import Observed, observe

_NAMES = ["one.bias", "one.weight", "two.weight"]


def _average(observed: Observed, step: int) -> torch.Tensor:
    parts = parts_of(observed.observation, step, _NAMES)
    assert sorted(parts) == [(rank, backward) for rank in range(2) for backward in range(2)]
    return torch.stack(list(parts.values())).sum(0) / 2


@pytest.mark.parametrize(
    "model",
    [
        "nn.parallel.DistributedDataParallel(Net())",
        "fully_shard(Net())",
        "fully_shard(Sharded())",
        "FSDP(Net(), device_id=torch.device('cpu'), use_orig_params=True)",
        "FSDP(Net(), device_id=torch.device('cpu'))",
    ],
)
def test_the_parts_of_all_backwards_add_up_to_the_gradient(tmp_path: Path, model: str) -> None:
    source = f"""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

    def Sharded():
        model = Net()
        fully_shard(model.one)
        return model

    model = {model}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            first = (2 * step + micro) * 3 + rank
            (model(x[first : first + 1]) - y[first : first + 1]).sum().backward()
        optimizer.step()
    """
    observed = observe(tmp_path, source, 2, parts=True)
    assert observed.notes == []
    for step in range(2):
        wanted = torch.cat([observed.value("gradient", name, step).reshape(-1) for name in _NAMES])
        assert torch.equal(_average(observed, step), wanted)


def test_a_part_of_a_tensor_parallel_gradient_is_none(tmp_path: Path) -> None:
    source = """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh, plan = init_device_mesh("cpu", (W,)), {"one": ColwiseParallel(), "two": RowwiseParallel()}
    model = parallelize_module(Net(inner=4), mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).sum().backward()
    optimizer.step()
    """
    observed = observe(tmp_path, source, 2, parts=True)
    assert len(observed.values("gradient")) == 3
    assert parts_of(observed.observation, 0, _NAMES) == {}


def test_parts_are_kept_where_they_are_wanted_only(tmp_path: Path) -> None:
    source = "train(Net(), torch.optim.SGD(Net().parameters(), lr=0.0), 1)"
    assert not [key for key in observe(tmp_path, source, 1).observation.ranks[0].pieces if key.kind.startswith("part ")]
