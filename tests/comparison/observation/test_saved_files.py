"""Distributed checkpoints are read again as a process without ranks does, and are what ranks held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdpcheck.comparison import facts
from fsdpcheck.comparison.observation.checkpoints import READ
from tests.comparison.observation.observing import Observed, observe

_SOURCE = """
from torch.distributed.checkpoint import DefaultSavePlanner, save
from torch.distributed.fsdp import fully_shard

class Forgetful(DefaultSavePlanner):
    def resolve_data(self, item):
        return super().resolve_data(item) * (rank != 1)

model = fully_shard(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
train(model, optimizer, steps=1)
save({"model": model.state_dict(), "step": torch.tensor(3)}, checkpoint_id=FOLDER, planner=PLANNER)
"""


def _observed(tmp_path: Path, size: int, planner: str = "None") -> Observed:
    source = _SOURCE.replace("FOLDER", repr(str(tmp_path / f"saved{size}"))).replace("PLANNER", planner)
    return observe(tmp_path, source, size)


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_read_is_what_ranks_held(tmp_path: Path, size: int) -> None:
    observed = _observed(tmp_path, size)
    saved = {key: value for key, value in observed.whole.values.items() if key.kind == "checkpoint"}
    read = {key: value for key, value in saved.items() if key.name.endswith(READ)}
    name = f"saved{size}"
    assert sorted(key.name for key in read) == sorted(
        f"{name}:{key}{READ}" for key in ("model.one.bias", "model.one.weight", "model.two.weight", "step")
    )
    for key, value in read.items():
        assert torch.equal(value, saved[key._replace(name=key.name.removesuffix(READ))])
    assert list(facts._files(observed.whole)) == []
    assert observed.notes == []


def test_a_shard_that_is_written_wrong_is_a_fact(tmp_path: Path) -> None:
    (fact,) = facts._files(_observed(tmp_path, 2, "Forgetful()").whole)
    assert fact.kind == "checkpoint"
    assert fact.text == (
        "saved2:model.one.bias is read from its files with 2 of 5 entries that are not those that ranks hold"
    )
