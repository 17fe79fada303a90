"""``assert_ranks_agree``: a script compared in a user's own test."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdpcheck
from fsdpcheck.errors import UsageError
from fsdpcheck.pytest_plugin.ranks_agree import RanksDisagree

_SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
world, rank, rows, lr = dist.get_world_size(), dist.get_rank(), int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
x = torch.arange(8.0).reshape(4, 2)[rank * rows : (rank + 1) * rows]
model(x).sum().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
if rows:
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "my train.py"
    path.write_text(_SCRIPT)
    return f"'{path}'"


def test_what_agrees_is_returned(script: str) -> None:
    found = fsdpcheck.assert_ranks_agree(script, ["{4//W}", "0.5"], ranks=(1, 2))
    assert (found.says, [world.size for world in found.worlds], found.steps) == ("agrees", [2], 1)


def test_what_differs_is_an_assertion_with_the_report(script: str) -> None:
    with pytest.raises(
        RanksDisagree, match=r"lr of weight is 1\.0 on rank 0 at step 0, where one rank has 0\.5"
    ) as raised:
        fsdpcheck.assert_ranks_agree(script, "{4//W} {0.5*W}", (1, 2))
    assert isinstance(raised.value, AssertionError)
    assert raised.value.comparison.says == "differs"


def test_where_nothing_can_be_decided_it_does_not_pass(script: str) -> None:
    with pytest.raises(RanksDisagree, match="no optimizer made a step on one rank"):
        fsdpcheck.assert_ranks_agree(script, ["0", "0.5"], (1, 2))


def test_arguments_that_are_none_are_named(script: str) -> None:
    with pytest.raises(UsageError, match="4 is not divided by 3"):
        fsdpcheck.assert_ranks_agree(script, ["{4//W}", "0.5"], (1, 3))
