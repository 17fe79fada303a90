"""Clipping rules, samples without a finite norm, steps that raise: on both ways of sharding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from fsdpcheck.impl.clipping import rules
from fsdpcheck.impl.clipping.modes import Mode, parse
from fsdpcheck.impl.clipping.nonfinite_samples import NonFiniteNorm
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Automatic, Flat, PerLayer
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.releases import with_a_way_back
from tests.common.tables import each, every_pair
from tests.impl.network import BOOKKEEPING, SIZES, X, Y, loss, network, per_sample, squared_norm, stepped
from tests.impl.ways import WAYS, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


# -- clipping rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_per_layer_clipping_bounds_each_group_by_itself(ranks: Ranks, way: str, world_size: int) -> None:
    """Groups that split a layer, factors of each group by the definition, on gradients that are exact."""
    rule = PerLayer({"0": 2.0**40, "1.0.weight": 2.0**40, "": 1.0})
    samples = per_sample(network(), X, Y)
    squared = torch.tensor(
        [[squared_norm(g, "0"), squared_norm(g, "1.0.weight"), squared_norm(g, "1.0.bias")] for g in samples]
    ).T

    def found(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        trainer = stepped(way, rank, world_size, Privacy(rule, BOOKKEEPING), X)
        return torch.cat(trainer.found.factors, 1), torch.cat(trainer.found.norms), trainer.model.full_gradients()

    start = 0
    for factors, norms, gradients in ranks(found, world_size):
        stop = start + factors.shape[1]
        wanted = rule.factors(squared[:, start:stop].double())
        assert torch.equal(factors, wanted)
        assert torch.equal(norms, squared[:, start:stop].sum(0).double().sqrt())
        assert torch.equal(gradients["0.0.weight"] * world_size, sum(g["0.0.weight"] for g in samples))  # type: ignore[arg-type]
        assert torch.equal(gradients["1.0.weight"] * world_size, sum(g["1.0.weight"] for g in samples))  # type: ignore[arg-type]
        bound = sum(1.0 for g in samples if g["1.0.bias"].any())
        assert gradients["1.0.bias"].norm() * world_size <= bound
        start = stop


def test_sensitivities() -> None:
    assert Flat(3.0).sensitivity == 3
    assert Automatic(3.0).sensitivity == 3
    assert PerLayer({"a": 3.0, "b": 4.0}).sensitivity == 5


def test_automatic_clipping_by_its_definition() -> None:
    squared = torch.tensor([0.0, 4.0, 9.0, 1e8], dtype=torch.float64)
    assert torch.equal(Automatic(2.0, 1.0).factors(squared), 2 / (squared.sqrt() + 1))
    assert Automatic(2.0, 0.0).factors(squared).tolist() == [0.0, 1.0, 2 / 3, 2e-4]


@each(
    ("make", "message"),
    [
        (lambda: Flat(0.0), "got 0.0 as clip_norm, wanted a positive finite number"),
        (lambda: Flat(math.inf), "got inf as clip_norm"),
        (lambda: Automatic(1.0, -1.0), "got gamma -1.0"),
        (lambda: PerLayer({}), "got no bounds"),
        (lambda: PerLayer({"a": -1.0}), "the clip norm of a, wanted a positive"),
        (lambda: PerLayer({"a": 1.0}).group_of("b.weight"), "parameter b.weight is in no clipping group, groups are a"),
        (lambda: Privacy(PerLayer({"": 1.0})).mode_in_force(), "per-layer clipping in two passes.*ghost_bk"),
        (lambda: Privacy(Flat(1.0), nonfinite="drop").mode_in_force(), "nonfinite='drop' in two passes.*ghost_bk"),
    ],
)
def test_bad_rules_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_longest_prefix_decides_and_is_not_a_mere_beginning() -> None:
    rule = rules.PerLayer({"layer1": 1.0, "layer1.weight": 2.0, "": 3.0})
    assert [rule.group_of(name) for name in ("layer1.bias", "layer1.weight", "layer10.bias")] == [0, 1, 2]


MODES = ("ghost", "flash", "ghost_bk", "flash_bk")


# -- samples without a finite norm -------------------------------------------------------------------------------------


def with_bad(value: float) -> Tensor:
    x = X.clone()
    x[3] = value
    return x


@every_pair({"mode": MODES, "world_size": SIZES, "way": WAYS, "bad": [math.nan, math.inf]})
def test_every_rank_raises_and_names_sample_and_rank(
    ranks: Ranks, way: str, world_size: int, bad: float, mode: str
) -> None:
    def message(rank: int) -> tuple[str, dict[int, int]]:
        with pytest.raises(
            NonFiniteNorm, match=r"sample 3 on rank .*look at these inputs, or leave .*'drop'"
        ) as caught:
            stepped(way, rank, world_size, Privacy(Flat(1.0), parse(mode)), with_bad(bad))
        return str(caught.value), caught.value.samples

    last = [rank for rank, size in enumerate(SIZES[world_size]) if size][-1]
    found = ranks(message, world_size)
    assert found == [found[0]] * world_size
    assert found[0][1] == {last: 3}


@every_pair(
    {
        "world_size": SIZES,
        "rule": [Flat(2.0**40), PerLayer({"0": 2.0**40, "": 2.0**41})],
        "mode": ["ghost_bk", "flash_bk"],
        "way": WAYS,
        "bad": [math.nan, math.inf],
    }
)
def test_dropped_samples_leave_the_rest_as_if_they_were_not_there(
    ranks: Ranks, way: str, world_size: int, bad: float, mode: str, rule: rules.Clipping
) -> None:
    wanted = [g for i, g in enumerate(per_sample(network(), X, Y)) if i != 3]
    privacy = Privacy(rule, parse(mode), nonfinite="drop")

    def found(rank: int) -> tuple[dict[str, Tensor], list[int]]:
        trainer = stepped(way, rank, world_size, privacy, with_bad(bad))
        return trainer.model.full_gradients(), trainer.found.nonfinite

    results = ranks(found, world_size)
    assert sorted(index for _, bad_ones in results for index in bad_ones) == [3]
    for gradients, _ in results:
        for name, gradient in gradients.items():
            assert torch.equal(gradient * world_size, sum(g[name] for g in wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_sample_is_left_out_exactly_if_it_is_named(ranks: Ranks, groups: int) -> None:
    """In float32 both layers' squared norms 4 x^4 are finite at x = 2.8e9, and their sum is not."""
    rule = PerLayer({"0": 2.0**60, "": 2.0**60} if groups == 2 else {"": 2.0**60})

    def found(rank: int) -> tuple[list[int], dict[str, Tensor]]:
        module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        for parameter in module.parameters():
            parameter.data.fill_(1)
        privacy = Privacy(rule, BOOKKEEPING, nonfinite="drop")
        trainer = Trainer(
            WAYS["flat"](module, ["0"], True), lambda y, t: y.square().sum(1), sgd, Options(1, privacy=privacy)
        )
        trainer.step([MicroBatch(torch.tensor([[1.0], [2.8e9]]), torch.zeros(2), [0, 1])])
        return trainer.found.nonfinite, trainer.model.full_gradients()

    ((named, gradients),) = ranks(found, 1)
    assert named == [1]
    assert {name: value.item() for name, value in gradients.items()} == {"0.weight": 2.0, "1.weight": 2.0}


# -- a step that raises ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
@pytest.mark.parametrize("way", with_a_way_back(WAYS))
def test_after_an_exception_the_next_step_is_clean(ranks: Ranks, way: str, mode: Mode, where: str) -> None:
    """All ranks raise in a step; the next one equals the first step of a fresh trainer."""

    def explode(*_: Any) -> None:
        raise KeyError("on purpose")

    def run(broken: bool) -> Any:
        def gradients(rank: int) -> dict[str, Tensor]:
            module = network()
            options = Options(normaliser=2, privacy=Privacy(Flat(2.0**40), mode))
            trainer = Trainer(WAYS[way](module, ["0", "1"], True), loss, sgd, options)
            micro = MicroBatch(X[[rank]], Y[[rank]], [rank])
            if broken:
                layer = module[0][0]
                handle = (
                    layer.register_forward_hook(explode)
                    if where == "forward"
                    else layer.register_full_backward_hook(explode)
                )
                with pytest.raises(KeyError, match="on purpose"):
                    trainer.step([micro])
                handle.remove()
            trainer.step([micro])
            return trainer.model.full_gradients()

        return gradients

    wanted, got = ranks(run(False), 2), ranks(run(True), 2)
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
