"""State dicts, replicas, odd tensors, messages counted, files of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdpcheck.impl import state
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import ALONE
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.state import optimizer_state
from tests.impl.training import (
    UNITS,
    WAYS,
    WORLDS,
    Net,
    Training,
    adam,
    assert_same,
    flat,
    groups_apart,
    replicated_flat,
    replicated_per_parameter,
    seen,
    sharded,
    stepped,
    values,
    whole,
)

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


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
