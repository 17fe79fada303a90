"""What saving and loading refuse: on all ranks, with one message, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fsdpcheck.impl import state
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from tests.impl.training import Counters, Net, adam, assert_same, groups_apart, seen, sharded, stepped, values

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


def thawed() -> Net:
    net = Net()
    net.head.bias.requires_grad_(True)
    return net


def frozen() -> Net:
    net = Net()
    net.units[0][2].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    return net


def apart() -> Net:
    net = Net()
    net.units[0][2].weight = nn.Parameter(torch.zeros(3, 3).double())  # type: ignore[index, union-attr]
    return net


class Extra(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("more", torch.zeros(1))


class OwnState(Net):
    def get_extra_state(self) -> Any:
        return 1


Refused = Callable[[int, Path], object]

REFUSED: dict[str, tuple[Refused, str]] = {
    "another folder": (lambda rank, folder: state.load(folder / "no", sharded()), "there is no checkpoint"),
    "an old folder": (lambda rank, folder: state.save(folder, sharded()), "a checkpoint already .*a folder of its own"),
    "missing": (lambda rank, folder: state.load(folder, sharded(Extra())), "got     a file without head.more"),
    "untied": (lambda rank, folder: state.load(folder, sharded(apart())), "without units.0.2.weight"),
    "unexpected": (
        lambda rank, folder: state.load(folder, ShardedModel(Net().head, [], collectives.axis(), True)),
        "and with head.bias, head.weight, scale, units.0.0.bias, units.0.0.weight and 3 more that",
    ),
    "shape": (lambda rank, folder: state.load(folder, sharded(Net(hidden=4))), r"got     \[1, 5\]"),
    "dtype": (lambda rank, folder: state.load(folder, sharded(Net().float())), "wanted  .* torch.float32"),
    "without counters": (
        lambda rank, folder: (model := sharded(), state.load(folder, model, adam(model))),
        "got     noise\n  wanted  nothing",
    ),
    "other extra": (
        lambda rank, folder: (m := sharded(), state.load(folder, m, adam(m), {"sampler": Counters(0, 0)})),
        "got     noise\n  wanted  sampler",
    ),
    "thawed": (
        lambda rank, folder: (m := sharded(thawed()), state.load(folder, m, adam(m), {"noise": Counters(0, 0)})),
        "no optimizer state of head.bias",
    ),
    "frozen": (
        lambda rank, folder: (m := sharded(frozen()), state.load(folder, m, adam(m), {"noise": Counters(0, 0)})),
        "does not update\n  got     units.0.2.bias",
    ),
    "own state": (lambda rank, folder: state.save(folder / "x", sharded(OwnState())), "got     _extra_state"),
    "counters apart": (
        lambda rank, folder: state.save(folder / "x", sharded(), None, {"noise": Counters(7, rank)}),
        r"on rank 0 and on rank 1: \['extra'\]\['noise'\]\['step'\]: 0 and 1",
    ),
    "keys apart": (
        lambda rank, folder: state.save(folder / "x", sharded(), None, {"noise": Counters(bytes([rank]), 0)}),  # type: ignore[arg-type]
        r"\['extra'\]\['noise'\]\['seed'\]: <1 bytes> and <1 bytes>",
    ),
    "strange extra": (
        lambda rank, folder: state.save(folder / "x", sharded(), None, {"noise": Counters(object(), 0)}),  # type: ignore[arg-type]
        r"got     extra\['noise'\].state_dict\(\)\['seed'\] of type object",
    ),
    "a stranger's optimizer": (
        lambda rank, folder: state.save(folder / "x", sharded(), torch.optim.SGD(Net().parameters(), lr=1.0)),
        "no shards of the model",
    ),
    "no optimizer": (
        lambda rank, folder: (
            m := sharded(),
            state.save(folder / "x", m),
            state.load(folder / "x", m, adam(m)),
        ),
        "saved without an optimizer",
    ),
    "groups apart": (
        lambda rank, folder: (
            m := sharded(),
            state.save(folder / "x", m, groups_apart(m)),
            state.load(folder / "x", m, adam(m)),
        ),
        r"saved with different hyperparameters\n.*\['lr'\]: 0.5 and 0.001",
    ),
    "state of one number and many": (
        lambda rank, folder: (m := sharded(), state.save(folder / "x", m, with_row_state(m))),
        r"got     rows of shape \[2\]",
    ),
    "damaged": (
        lambda rank, folder: (m := sharded(), damage(folder, rank), state.load(folder, m)),
        "could not read or write the checkpoint",
    ),
}


def with_row_state(model: ShardedModel) -> torch.optim.Optimizer:
    optimizer = adam(model)
    optimizer.state[model.shards()[0]]["rows"] = torch.zeros(2)
    return optimizer


def damage(folder: Path, rank: int) -> None:
    """One rank's file is cut off."""
    path = folder / f"__{rank}_0.distcp"
    if rank == 1:
        path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path, what: str) -> None:
    act, message = REFUSED[what]

    def prepare(rank: int) -> None:
        model = sharded()
        state.save(tmp_path, model, stepped(model), {"noise": Counters(7, 2)})

    def body(rank: int) -> str:
        with pytest.raises((state.StateError, TypeError, ValueError), match=f"(?s){message}") as raised:
            act(rank, tmp_path)
        return str(raised.value)

    ranks(prepare, 2)
    first, second = ranks(body, 2)
    assert first == second
    assert all(word in first for word in ("got ", "wanted ", "next ")) or what == "damaged"


def test_a_refused_load_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = sharded()
        optimizer = stepped(model)
        state.save(tmp_path, model, optimizer, {"noise": Counters(7, 2)})
        model.shards()[0].detach().add_(1)
        before = seen(model, optimizer)
        with pytest.raises(state.StateError):
            state.load(tmp_path, model, optimizer)
        assert_same(values(seen(model, optimizer)), values(before))

    ranks(body, 2)
