"""State dicts, replicas, files of others, messages counted, and what loading refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdpcheck.impl import collectives, optimizer_state, state
from fsdpcheck.impl.collectives import ALONE
from fsdpcheck.impl.per_parameter import PerParameterModel
from fsdpcheck.impl.wrap import ShardedModel

from .training import (
    UNITS,
    WAYS,
    WORLDS,
    Counters,
    Net,
    Training,
    assert_same,
    flat,
    replicated_flat,
    replicated_per_parameter,
    seen,
    whole,
)

if TYPE_CHECKING:
    from .conftest import Ranks


def equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_full_state_dict_is_that_of_the_unsharded_module(ranks: Ranks, way: str, world_size: int) -> None:
    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = WAYS[way](Net())
        return state.full_state_dict(model), state.full_state_dict(model, everywhere=False)

    wanted = Net().state_dict()
    for rank, (everywhere, on_rank_0) in enumerate(ranks(body, world_size)):
        assert equal(everywhere, dict(wanted))
        assert equal(on_rank_0, dict(wanted) if rank == 0 else {})
    other = Net()
    nn.init.zeros_(other.head.weight)
    other.load_state_dict(everywhere)
    assert torch.equal(other.head.weight, wanted["head.weight"])


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_state_dict_names_everything_and_communicates_nothing(ranks: Ranks, way: str) -> None:
    def body(rank: int) -> set[str]:
        return set(state.sharded_state_dict(WAYS[way](Net())))

    canonical = {*dict(Net().named_parameters()), "scale"}
    assert all(names == canonical for names in ranks(body, 3))
    assert ranks.trace(1) == []


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_opt_out_never_hold_a_whole_parameter(ranks: Ranks, way: str) -> None:
    ranks(lambda rank: state.full_state_dict(WAYS[way](Net()), everywhere=False) and None, 3)
    assert [op for op, _ in ranks.trace(2)] == ["all_gather", "gather"]
    assert ranks.execution is not None
    assert all(call.outputs == () or call.op == "all_gather" for call in ranks.execution.ranks[2].trace)


REPLICATED = {"flat": replicated_flat, "per-parameter": replicated_per_parameter}


@pytest.mark.parametrize("way", REPLICATED)
def test_with_replicas_one_of_them_writes_and_all_read(ranks: Ranks, tmp_path: Path, way: str) -> None:
    def build(rank: int) -> Training:
        return Training(REPLICATED[way], "adam", rank, 4)

    def save(rank: int) -> Any:
        training = build(rank)
        training.step()
        training.save(tmp_path)
        return seen(training.model, training.optimizer)

    def load(rank: int) -> Any:
        training = build(rank)
        training.scramble()
        training.load(tmp_path)
        return seen(training.model, training.optimizer)

    wanted = ranks(save, 4)
    got = ranks(load, 4)
    assert [found["spans"]["head.weight"].writes for found in wanted] == [True, True, False, False]
    assert_same(whole(got), whole(wanted))  # of what writes
    for rank in (0, 1):
        assert_same(values(got[rank]), values(got[rank + 2]))


def values(found: dict[str, Any]) -> dict[str, Any]:
    """Spans and plain state of one rank."""
    return {name: span.value for name, span in found["spans"].items()} | {"plain": found["plain"]}


def test_messages_do_not_depend_on_the_model(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for way in WAYS:
        for with_optimizer in (False, True):
            folder = tmp_path / f"{way} {with_optimizer}"

            def body(rank: int, way: str = way, folder: Path = folder, full: bool = with_optimizer) -> None:
                model = WAYS[way](Net())
                optimizer = torch.optim.SGD(model.shards(), lr=1.0) if full else None
                state.save(folder, model, optimizer)
                state.load(folder, model, optimizer)

            ranks(body, 3)
            found.append([op for op, _ in ranks.trace(1)])
    assert found == [[*SAVING, *LOADING]] * 4


GATHER, SCATTER = ["all_gather", "gather"], ["broadcast", "scatter", "scatter"]
SAVING = [*GATHER, *SCATTER, *GATHER, "broadcast", "broadcast"]
LOADING = [*GATHER, *SCATTER, "all_gather", "all_gather"]


def test_one_rank_communicates_nothing(ranks: Ranks, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        training = Training(flat, "adam", rank, 1)
        training.save(tmp_path)
        training.load(tmp_path)

    ranks(body, 1)
    assert ranks.trace(0) == []


class Odd(nn.Module):
    """A parameter without elements, one of one element and no dim, two dtypes, a transposed buffer."""

    turned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.number = nn.Parameter(torch.tensor(3.0))
        self.half = nn.Linear(2, 3).bfloat16()
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4)])
def test_odd_tensors_come_back(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    def save(rank: int) -> None:
        torch.manual_seed(5)
        model = ShardedModel(Odd(), ["half"], collectives.axis(), True)
        state.save(tmp_path, model, stepped(model))

    def load(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
        module = Odd()
        module.turned.zero_()
        model = ShardedModel(module, ["half"], collectives.axis(), True)
        optimizer = adam(model)
        state.load(tmp_path, model, optimizer)
        full = state.full_state_dict(model), state.full_state_dict(model, everywhere=False)
        return *full, sorted(optimizer_state.spans(model, optimizer))

    ranks(save, before)
    torch.manual_seed(5)
    module = Odd()
    single = torch.optim.Adam(module.parameters(), foreach=False)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    single.step()
    moments = sorted(
        f"optimizer.state.{n}.{m}" for n, _ in module.named_parameters() for m in ("exp_avg", "exp_avg_sq")
    )
    for rank, (everywhere, on_rank_0, names) in enumerate(ranks(load, after)):
        assert equal(everywhere, dict(module.state_dict()))
        assert equal(on_rank_0, dict(module.state_dict()) if rank == 0 else {})
        assert names == moments


def computing(way: str, dtype: torch.dtype | None) -> ShardedModel | PerParameterModel:
    """Computes in ``dtype``, and keeps shards in float64."""
    if way == "flat":
        return ShardedModel(Net(), UNITS, collectives.axis(), True, compute_dtype=dtype)
    mesh = init_device_mesh("cpu", (collectives.axis().size,))
    return PerParameterModel(Net(), UNITS, mesh, True, compute_dtype=dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_what_was_gathered_before_loading_is_forgotten(
    ranks: Ranks, tmp_path: Path, way: str, world_size: int, dtype: torch.dtype | None
) -> None:
    """The root stays gathered after a forward without a backward."""

    def body(rank: int) -> tuple[Tensor, Tensor, set[torch.dtype]]:
        model = computing(way, dtype)
        x = torch.ones(1, 3, dtype=dtype or torch.float64)
        before = model(x).detach().clone()
        model.reshard()
        state.save(tmp_path, model)
        for shard in model.shards():
            shard.detach().zero_()
        model(x)
        state.load(tmp_path, model)
        dtypes = {span.value.dtype for span in state.sharded_state_dict(model).values()}
        return before, model(x).detach().clone(), dtypes

    for before, after, dtypes in ranks(body, world_size):
        assert before.any()
        assert torch.equal(before, after)
        assert dtypes == {torch.float64}


# -- files of others -------------------------------------------------------------------------------------------------


def untied() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()


def test_others_read_the_file(ranks: Ranks, tmp_path: Path) -> None:
    """DCP's own planner into a plain module, and DCP's own conversion."""
    torch.manual_seed(3)
    source = untied()
    wanted = {name: value.clone() for name, value in source.state_dict().items()}
    values = {name: value.clone() for name, value in wanted.items()}

    def save(rank: int) -> None:
        module = untied()
        module.load_state_dict(values)
        state.save(tmp_path / "a", ShardedModel(module, ["0"], collectives.axis(), True))

    def load(rank: int) -> dict[str, Tensor]:
        module = untied()
        dcp.load({"model": module.state_dict()}, checkpoint_id=tmp_path / "a")
        return dict(module.state_dict())

    ranks(save, 3)
    for got in ranks(load, 2):
        assert equal(got, wanted)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "plain.pt")
    assert equal(torch.load(tmp_path / "plain.pt")["model"], wanted)


def test_a_file_of_others_is_read(ranks: Ranks, tmp_path: Path) -> None:
    """Written by DCP's own planner from ``fully_shard``."""

    def save(rank: int) -> None:
        torch.manual_seed(3)
        module = untied()
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path)

    def load(rank: int) -> dict[str, Tensor]:
        model = ShardedModel(untied(), ["0"], collectives.axis(), True)
        state.load(tmp_path, model)
        return model.full_values()

    ranks(save, 2)
    torch.manual_seed(3)
    wanted = dict(untied().state_dict())
    for got in ranks(load, 3):
        assert equal(got, wanted)


# -- what is refused -------------------------------------------------------------------------------------------------


def sharded(module: nn.Module | None = None) -> ShardedModel:
    return ShardedModel(Net() if module is None else module, UNITS, collectives.axis(), True)


def adam(model: ShardedModel) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.shards(), foreach=False)


def stepped(model: ShardedModel) -> torch.optim.Optimizer:
    optimizer = adam(model)
    for shard in model.shards():
        shard.grad = torch.ones_like(shard)
    optimizer.step()
    return optimizer


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


def groups_apart(model: ShardedModel) -> torch.optim.Optimizer:
    first, *rest = model.shards()
    return torch.optim.Adam([{"params": [first], "lr": 0.5}, {"params": rest}], foreach=False)


Refused = Callable[[int, Path], object]

REFUSED: dict[str, tuple[Refused, str]] = {
    "another folder": (lambda rank, folder: state.load(folder / "no", sharded()), "there is no checkpoint"),
    "an old folder": (lambda rank, folder: state.save(folder, sharded()), "already exists"),
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
    assert all(word in first for word in ("got ", "wanted ", "next ")) or what in ("an old folder", "damaged")


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


def test_parameter_groups_come_back_by_name(ranks: Ranks, tmp_path: Path) -> None:
    """In another order of groups, at another number of ranks."""

    def save(rank: int) -> None:
        model = sharded()
        state.save(tmp_path, model, groups_apart(model))

    def load(rank: int) -> list[float]:
        model = sharded()
        first, *rest = model.shards()
        optimizer = torch.optim.Adam([{"params": rest}, {"params": [first]}], lr=0.25, foreach=False)
        state.load(tmp_path, model, optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    ranks(save, 2)
    assert ranks(load, 3) == [[0.001, 0.5]] * 3


def test_a_process_without_groups_saves_and_loads(tmp_path: Path) -> None:
    model = ShardedModel(Net(), UNITS, ALONE, True)
    optimizer = stepped(model)
    state.save(tmp_path, model, optimizer)
    other = ShardedModel(Net(hidden=5), UNITS, ALONE, True)
    other.shards()[0].detach().fill_(9)
    found = adam(other)
    state.load(tmp_path, other, found)
    assert_same(whole([seen(other, found)]), whole([seen(model, optimizer)]))
    assert optimizer_state.describe(other, found).elementwise["head.weight"] == ["exp_avg", "exp_avg_sq"]
