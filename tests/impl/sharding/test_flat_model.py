"""Units: who owns what, what is alive when, what is refused, and which collectives are issued in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.sharding.flat_model import ShardedModel, make_units

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

ALONE = Axis(None, 0, 1)


class Net(nn.Module):
    """Two units of equal shapes, then a layer of the root; weights are 1, 2, 3 and 4."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
        self.head = nn.Linear(2, 2, bias=False)
        for i, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, i + 1)
        if tie:
            self.units[1][0].weight = self.units[0][0].weight  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        head: Tensor = self.head(x)
        return head


UNITS = ["units.0", "units.1"]


def names(model: nn.Module, units: list[str]) -> dict[str, list[str]]:
    made = make_units(model, units, ALONE)
    return {unit.fqn: [name for buffer in unit.buffers for name in buffer.names] for unit in made}


def test_parameters_belong_to_the_innermost_unit() -> None:
    assert names(Net(), ["units", "units.1"]) == {
        "(root)": ["head.weight"],
        "units": ["units.0.0.weight", "units.0.0.bias"],
        "units.1": ["units.1.0.weight", "units.1.0.bias"],
    }


def test_a_parameter_tied_across_units_belongs_to_the_root_under_its_first_name() -> None:
    owned = names(Net(tie=True), UNITS)
    assert owned["(root)"] == ["units.0.0.weight", "head.weight"]
    assert owned["units.0"] == ["units.0.0.bias"]
    assert owned["units.1"] == ["units.1.0.bias"]


def test_a_parameter_tied_inside_a_unit_stays_there_once() -> None:
    assert names(Net(tie=True), ["units"])["units"] == ["units.0.0.weight", "units.0.0.bias", "units.1.0.bias"]


def test_frozen_parameters_have_a_buffer_of_their_own() -> None:
    model = Net()
    model.units[0][0].weight.requires_grad_(False)  # type: ignore[index]
    unit = make_units(model, UNITS, ALONE)[1]
    assert unit.trainable is not None
    assert unit.frozen is not None
    assert (unit.trainable.names, unit.frozen.names) == (["units.0.0.bias"], ["units.0.0.weight"])
    assert not unit.frozen.shard.requires_grad


def test_a_unit_without_parameters_is_empty() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
    assert names(model, ["0"])["0"] == []


def test_an_unknown_unit_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"no modules named \['units.7'\]"):
        make_units(Net(), ["units.7"], ALONE)


def replace_weight(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(2, 2))


def freeze_bias(model: Net) -> None:
    for parameter in model.units.parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [(replace_weight, "head.weight was replaced after sharding"), (freeze_bias, "requires_grad of units.0.0.weight")],
)
def test_a_parameter_changed_after_wrapping_is_refused(change: Any, message: str) -> None:
    model = Net()
    sharded = ShardedModel(model, UNITS, ALONE, True)
    change(model)
    with pytest.raises(RuntimeError, match=message):
        sharded(torch.ones(1, 2))


def alive(sharded: ShardedModel) -> list[str]:
    """Units whose full buffers hold memory."""
    held = {unit.fqn: [buffer.full.untyped_storage().nbytes() > 0 for buffer in unit.buffers] for unit in sharded.units}
    return [name for name, flags in held.items() if any(flags)]


@pytest.mark.parametrize(("reshard", "after_forward"), [(True, ["(root)"]), (False, ["(root)", *UNITS])])
def test_what_is_alive_when(ranks: Ranks, reshard: bool, after_forward: list[str]) -> None:
    def body(rank: int) -> dict[str, list[str]]:
        model = Net()
        before = list(model.parameters())
        sharded = ShardedModel(model, UNITS, collectives.axis(), reshard)
        found = {"wrapped": alive(sharded)}
        output = sharded(torch.ones(1, 2))
        found["forward"] = alive(sharded)
        sharded.backward(output, torch.ones_like(output))
        found["backward"] = alive(sharded)
        sharded.reduce_gradients()
        sharded.reshard()
        found["reshard"] = alive(sharded)
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        return found

    for found in ranks(body, 2):
        # The first unit's input needs no gradient, so only the end of the backward frees it.
        assert found == {
            "wrapped": [],
            "forward": after_forward,
            "backward": ["(root)", "units.0"],
            "reshard": [],
        }


def train_once(reshard: bool, rows: int = 1) -> None:
    sharded = ShardedModel(Net(), UNITS, collectives.axis(), reshard)
    output = sharded(torch.ones(rows, 2))
    sharded.backward(output, torch.ones_like(output))
    sharded.reduce_gradients()
    sharded.reshard()


GATHERS = [("all_gather", "(root)"), ("all_gather", "units.0"), ("all_gather", "units.1")]
AGAIN = [("all_gather", "units.1"), ("all_gather", "units.0")]
REDUCTIONS = [("reduce_scatter", "units.1"), ("reduce_scatter", "units.0"), ("reduce_scatter", "(root)")]


@pytest.mark.parametrize(
    ("reshard", "wanted"), [(True, [*GATHERS, *AGAIN, *REDUCTIONS]), (False, GATHERS + REDUCTIONS)]
)
def test_collectives_of_one_step(ranks: Ranks, reshard: bool, wanted: list[tuple[str, str]]) -> None:
    ranks(lambda rank: train_once(reshard, rows=rank), 3)
    assert [ranks.trace(rank) for rank in range(3)] == [wanted] * 3


def test_with_replicas_each_shard_is_averaged_over_its_copies_after_it_was_reduced(ranks: Ranks) -> None:
    def body(rank: int) -> dict[str, list[float]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        axes = [collectives.axis(mesh.get_group(name)) for name in ("shard", "replicate")]
        sharded = ShardedModel(Net(), UNITS, axes[0], True, axes[1])
        for unit in sharded.units:
            unit.unshard()
        sharded.module.head.weight.grad = torch.full((2, 2), 2.0**rank)
        sharded.reduce_gradients()
        return {name: gradient.flatten().tolist() for name, gradient in sharded.full_gradients().items()}

    assert all(gradients["head.weight"] == [15 / 4] * 4 for gradients in ranks(body, 4))
    reductions = [(op, subject) for op, subject in ranks.trace(3) if op != "all_gather"]
    assert reductions == [pair for scatter in REDUCTIONS for pair in (scatter, ("all_reduce", scatter[1]))]


def test_one_rank_communicates_nothing(ranks: Ranks) -> None:
    ranks(lambda rank: train_once(True), 1)
    assert ranks.trace(0) == []


def test_a_missing_gradient_counts_as_zero(ranks: Ranks) -> None:
    def body(rank: int) -> dict[str, list[float]]:
        sharded = ShardedModel(Net(), UNITS, collectives.axis(), True)
        sharded.units[0].unshard()
        if rank == 0:
            sharded.module.head.weight.grad = torch.full((2, 2), 6.0)
        sharded.reduce_gradients()
        return {name: gradient.flatten().tolist() for name, gradient in sharded.full_gradients().items()}

    for gradients in ranks(body, 3):
        assert gradients.pop("head.weight") == [2.0] * 4
        assert not any(any(values) for values in gradients.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_one_wrong_element_of_one_shard_of_one_rank_is_shown_by_every_rank(ranks: Ranks, world_size: int) -> None:
    """And nothing else is: each element of each shard is one element of one whole parameter, padding none."""

    def body(rank: int) -> list[tuple[int, int]]:
        model = Net()
        model.units[0][0].weight.requires_grad_(False)  # type: ignore[index]
        sharded = ShardedModel(model, UNITS, collectives.axis(), True)
        right, found = sharded.full_values(), []
        for buffer in [buffer for unit in sharded.units for buffer in unit.buffers]:
            for wrong in range(world_size):
                for element in range(buffer.shard_numel):
                    shard = buffer.shard.detach()
                    shard[element] += int(rank == wrong)
                    shown = sharded.full_values()
                    shard[element] -= int(rank == wrong)
                    differing = {name for name, value in shown.items() if not torch.equal(value, right[name])}
                    count = sum(int((value != right[name]).sum()) for name, value in shown.items())
                    real = wrong * buffer.shard_numel + element < buffer.numel
                    assert differing <= set(buffer.names)
                    found.append((count, int(real)))
        return found

    everyone = ranks(body, world_size)
    assert all(shown == real for found in everyone for shown, real in found)
    assert sum(real for _, real in everyone[0]) == sum(parameter.numel() for parameter in Net().parameters())


def test_what_is_shown_travels_in_one_gather_and_is_new(ranks: Ranks) -> None:
    def body(rank: int) -> None:
        sharded = ShardedModel(Net(), UNITS, collectives.axis(), True)
        for values in (sharded.full_values(), sharded.full_gradients()):
            for value in values.values():
                value.fill_(float("nan"))
        assert not any(bool(shard.isnan().any()) for shard in sharded.shards())

    ranks(body, 3)
    assert ranks.trace(0) == [("all_gather", "(whole tensors, to show)")] * 2
