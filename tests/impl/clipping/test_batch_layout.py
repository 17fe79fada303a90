"""Layouts: found out from the rows, and over both axes of a mesh; what is no batch."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from fsdpcheck.impl.clipping import batch_layout
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import ALONE
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.impl.network import X, Y, loss, network, per_sample, squared_norm
from tests.impl.ways import WAYS, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


# -- layouts from the samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts_are_found_out_from_the_rows(ranks: Ranks, world_size: int) -> None:
    def detected(batches: list[Tensor]) -> list[str]:
        return ranks(lambda rank: batch_layout.detect(batches[rank], collectives.axis()), world_size)

    assert detected([X] * world_size) == ["replicated"] * world_size
    assert detected([X[[rank]] for rank in range(world_size)]) == ["distributed"] * world_size
    assert detected([X[:0], *[X] * (world_size - 1)]) == ["distributed"] * world_size
    assert detected([X, *[X.flip(0)] * (world_size - 1)]) == ["distributed"] * world_size
    assert detected([X, *[X.float()] * (world_size - 1)]) == ["distributed"] * world_size


@pytest.mark.parametrize("rows", [X[:0], X[:1], X[[0, 1, 0]]], ids=["none", "one", "repeated"])
def test_equal_rows_that_tell_nothing_are_an_error_on_all_ranks(ranks: Ranks, rows: Tensor) -> None:
    def ask(rank: int) -> str:
        with pytest.raises(batch_layout.AmbiguousLayout) as caught:
            batch_layout.detect(rows, collectives.axis())
        return str(caught.value)

    found = ranks(ask, 3)
    assert found == [found[0]] * 3
    assert "say which with Options.layout" in found[0]


def test_one_rank_has_its_own_samples() -> None:
    assert batch_layout.detect(X[:1], ALONE) == "distributed"


# -- layouts over two axes, and losses that are none -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "contribution"),
    [
        *product(["shards", "both"], ["complete", "partial", "mixed"]),
        *product(["replicas", "neither"], ["complete"]),  # others would split elements and samples the same way
    ],
)
def test_layouts_over_a_mesh_of_two_axes(ranks: Ranks, over: str, contribution: Any) -> None:
    """2 x 2 ranks: the same samples inside a shard group, over replicas, everywhere or nowhere; the sum is the same."""
    shards: batch_layout.Layout = "replicated" if over in ("shards", "both") else "distributed"
    replicas: batch_layout.Layout = "replicated" if over in ("replicas", "both") else "distributed"
    layouts = batch_layout.Layouts(shards, replicas)
    samples = per_sample(network(), X, Y)

    def run(rank: int) -> tuple[batch_layout.Layouts, dict[str, Tensor], Tensor, list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        shard_axis, replica_axis = (collectives.axis(mesh.get_group(name)) for name in ("shards", "replicas"))
        model = ShardedModel(network(), ["0", "1"], shard_axis, True, replica_axis)
        rows = list(range(4))
        rows = rows[shard_axis.rank :: 2] if shards == "distributed" else rows
        rows = rows[replica_axis.rank * len(rows) // 2 :][: len(rows) // 2] if replicas == "distributed" else rows
        options = Options(4, layouts, Privacy(Flat(2.0**40), contribution=contribution))
        trainer = Trainer(model, loss, sgd, options)
        trainer.step([MicroBatch(X[rows], Y[rows], rows)])
        seen = batch_layout.detect_both(X[rows], shard_axis, replica_axis)
        return seen, model.full_gradients(), trainer.found.norms[0], rows

    norms = torch.tensor([squared_norm(g, "") for g in samples], dtype=torch.float64).sqrt()
    for seen, gradients, own, rows in ranks(run, 4):
        assert seen == layouts
        assert torch.equal(own, norms[rows])
        for name, gradient in gradients.items():
            assert torch.equal(gradient * 4, sum(g[name] for g in samples))  # type: ignore[arg-type]


@pytest.mark.parametrize("reduced", [lambda y, t: y.sum(), lambda y, t: y, lambda y, t: y.sum(1)[:-1]])
def test_a_loss_that_is_not_one_number_a_sample_is_refused(ranks: Ranks, reduced: Any) -> None:
    def refused(rank: int) -> str:
        trainer = Trainer(WAYS["flat"](network(), [], True), reduced, sgd, Options(1))
        with pytest.raises(ValueError, match=r"for 4 samples, wanted \(4,\), one a sample.*reduction='none'") as caught:
            trainer.step([MicroBatch(X, Y, [0, 1, 2, 3])])
        return str(caught.value)

    assert ranks(refused, 1)


def test_samples_without_numbers_are_refused(ranks: Ranks) -> None:
    def refused(rank: int) -> str:
        trainer = Trainer(WAYS["flat"](network(), [], True), loss, sgd, Options(1))
        with pytest.raises(ValueError, match="got 2 indices for 4 samples") as caught:
            trainer.step([MicroBatch(X, Y, [0, 1])])
        return str(caught.value)

    assert ranks(refused, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_changed_after_sharding_is_named(ranks: Ranks, way: str) -> None:
    def refused(rank: int) -> str:
        module = network()
        trainer = Trainer(WAYS[way](module, ["0"], True), loss, sgd, Options(1))
        module[1][0].weight = nn.Parameter(torch.ones(2, 4).double())
        with pytest.raises(RuntimeError, match=r"parameter 1\.0\.weight was replaced after sharding") as caught:
            trainer.step([MicroBatch(X, Y, [0, 1, 2, 3])])
        return str(caught.value)

    assert ranks(refused, 2)


def test_a_unit_gathered_by_hand_is_no_replaced_parameter(ranks: Ranks) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        module = network()
        model = WAYS["per-parameter"](module, ["0"], True)
        trainer = Trainer(model, loss, lambda p: torch.optim.SGD(p, lr=0.0), Options(2))
        assert isinstance(module, FSDPModule)
        for _ in range(2):
            module.unshard()
            trainer.step([MicroBatch(X[rank::2], Y[rank::2], [0, 1])])
        return trainer.model.full_gradients()

    samples = per_sample(network(), X, Y)
    for gradients in ranks(run, 2):
        for name, gradient in gradients.items():
            assert torch.equal(gradient * 2, sum(g[name] for g in samples))  # type: ignore[arg-type]
