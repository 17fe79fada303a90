"""Parameters that are left out of sharding: a step with them is the step in which all are sharded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.impl import state
from fsdpcheck.impl.clipping.batch_layout import Layouts
from fsdpcheck.impl.clipping.modes import parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.releases import resets_iterations
from tests.common.tables import each
from tests.impl import training
from tests.impl.network import SIZES, X, Y, loss, network
from tests.impl.training import OPTIMIZERS, Training, assert_same, flat, whole
from tests.impl.ways import WAYS, integers, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

PRIVATE = Privacy(Flat(2.0**40), noise_multiplier=2.0**-20, noise=gaussian.seeded(5))
"""Clips nothing, so that sums are exact however they are formed; the noise is what is added to them last."""
LEFT_OUT = ["0.0.bias", "1.0.weight"]
OPTIONS = {
    "plain": Options(8),
    "clipped by the global norm": Options(8, max_grad_norm=0.25),
    "one reduction": Options(8, sync_every=False),
    "two passes": Options(8, privacy=PRIVATE),
    "bookkeeping": Options(8, privacy=replace(PRIVATE, mode=parse("ghost_bk"))),
    "bookkeeping, one reduction": Options(8, privacy=replace(PRIVATE, mode=parse("ghost_bk")), sync_every=False),
    "partial norms": Options(8, Layouts("replicated"), replace(PRIVATE, contribution="partial")),
    "mixed norms": Options(8, Layouts("replicated"), replace(PRIVATE, contribution="mixed")),
}


def stepped(rank: int, world_size: int, options: Options, ignored: Collection[str]) -> dict[str, Any]:
    """What two micro-batches and their update leave on a rank."""
    start, own = sum(SIZES[world_size][:rank]), SIZES[world_size][rank]
    rows = list(range(start, start + own)) if options.layout.shards == "distributed" else list(range(4))
    trainer = Trainer(WAYS["per-parameter"](network(), ["0"], True, ignored=ignored), loss, sgd, options)
    trainer.step([MicroBatch(X[part], Y[part], part) for part in (rows[:1], rows[1:])])
    found = {f"gradient of {n}": g for n, g in trainer.model.full_gradients().items()} | trainer.model.full_values()
    norms = torch.cat(trainer.found.norms) if options.privacy else trainer.grad_norm
    return found | {"norms": torch.zeros(0) if norms is None else norms}


@pytest.mark.nightly
@each("world_size", [1, 2, 3])
@each("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_the_one_in_which_all_are_sharded(ranks: Ranks, options: Options, world_size: int) -> None:
    """Parameters, gradients with their noise, and norms, bit for bit on every rank; only the messages are others."""

    def body(rank: int) -> None:
        wanted, got = (stepped(rank, world_size, options, ignored) for ignored in ([], LEFT_OUT))
        for name, value in wanted.items():
            assert torch.equal(got[name], value), name

    ranks(body, world_size)
    reduced = {"1.0.weight", "0.0.bias"} <= {name for op, name in ranks.trace(0) if op == "all_reduce"}
    assert reduced == (world_size > 1)


def without(module: nn.Module) -> Sharded:
    """A tied weight, a frozen one and a head of one row are left out."""
    mesh = init_device_mesh("cpu", (collectives.axis().size,))
    ignored = ["units.0.0.weight", "units.1.weight", "head.weight"]
    return PerParameterModel(module, training.UNITS, mesh, True, ignored=ignored)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("saving", "loading"), [(without, flat), (flat, without), (without, without)])
def test_a_checkpoint_does_not_tell_what_was_left_out(
    ranks: Ranks, tmp_path: Path, kind: str, saving: training.Way, loading: training.Way
) -> None:
    def saves(rank: int) -> dict[str, Any]:
        before = Training(saving, kind, rank, 2)
        before.step()
        before.save(tmp_path)
        return before.step()

    def goes_on(rank: int) -> dict[str, Any]:
        after = Training(loading, kind, rank, 3)
        after.scramble()
        after.load(tmp_path)
        return after.step()

    wanted = whole(ranks(saves, 2))
    assert_same(whole(ranks(goes_on, 3)), wanted)


class Odd(nn.Module):
    """What ``fully_shard`` cannot shard: a parameter without rows, and one that two units use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.double()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = integers(*parameter.shape, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x)) * self.scale
        return found


def of_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(1)


def test_what_cannot_be_sharded_can_be_left_out(ranks: Ranks) -> None:
    alone = Odd()
    of_sum(alone(X), Y).sum().div(8).backward()  # type: ignore[no-untyped-call]
    wanted = {name: p.grad for name, p in alone.named_parameters()}

    def body(rank: int) -> None:
        model = WAYS["per-parameter"](Odd(), ["first", "second"], True, ignored=["first.weight", "scale"])
        trainer = Trainer(model, of_sum, sgd, Options(8))
        own = [0, 1, 2] if rank == 0 else [3]
        trainer.step([MicroBatch(X[own], Y[own], own)])
        for name, value in model.full_gradients().items():
            assert torch.equal(value, wanted[name]), name

    ranks(body, 2)


@resets_iterations
def test_after_a_step_that_raised_nothing_of_it_is_left(ranks: Ranks) -> None:
    def body(rank: int) -> None:
        wanted = stepped(rank, 2, OPTIONS["plain"], LEFT_OUT)
        trainer = Trainer(WAYS["per-parameter"](network(), ["0"], True, ignored=LEFT_OUT), loss, sgd, OPTIONS["plain"])
        rows = [0, 1, 2] if rank == 0 else [3]
        first = MicroBatch(X[rows[:1]], Y[rows[:1]], rows[:1])
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            trainer.step([first, MicroBatch(X, Y[:, 0], [0])])
        trainer.step([first, MicroBatch(X[rows[1:]], Y[rows[1:]], rows[1:])])
        for name, value in trainer.model.full_values().items():
            assert torch.equal(value, wanted[name]), name

    ranks(body, 2)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"ignored": ["0.weight"]}, r"got ignored parameters \['0.weight'\], wanted some of \['0.0.weight', "),
        ({"ignored": ["0.0.bias"], "compute_dtype": torch.bfloat16}, "got 1 ignored parameters and compute_dtype"),
        ({"ignored": ["1.0.weight"]}, r"ignored parameter 1.0.weight has strides \(1, 2\): make it contiguous"),
    ],
    ids=["unknown", "computed in another dtype", "not contiguous"],
)
def test_what_cannot_be_left_out_is_refused(ranks: Ranks, more: dict[str, Any], told: str) -> None:
    def body(rank: int) -> None:
        module = network()
        module[1][0].weight.data = torch.zeros(4, 2).double().T
        with pytest.raises(ValueError, match=told):
            WAYS["per-parameter"](module, ["0"], True, **more)

    ranks(body, 2)


def test_where_all_that_is_trained_is_left_out_the_ranks_call_the_same(ranks: Ranks) -> None:
    """Ranks that count no piece of the global norm add a zero of the gradients' own dtype, in any order of names."""

    def body(rank: int) -> None:
        module = network()
        for parameter in module[0].parameters():
            parameter.requires_grad_(False)
        names = ["1.0.weight", "1.0.bias", "0.0.weight"]
        model = WAYS["per-parameter"](module, ["0"], True, ignored=names if rank else [*reversed(names)])
        trainer = Trainer(model, loss, sgd, OPTIONS["clipped by the global norm"])
        own = [0, 1, 2] if rank == 0 else [3]
        trainer.step([MicroBatch(X[own], Y[own], own)])
        assert trainer.grad_norm is not None
        assert trainer.grad_norm > 0

    ranks(body, 2)


def test_a_gradient_that_is_not_averaged_yet_is_not_shown(ranks: Ranks) -> None:
    def body(rank: int) -> None:
        options = replace(OPTIONS["plain"], sync_every=False)
        trainer = Trainer(WAYS["per-parameter"](network(), ["0"], True, ignored=LEFT_OUT), loss, sgd, options)
        trainer.micro_step(MicroBatch(X[rank : rank + 1], Y[rank : rank + 1], [rank]), sync=False)
        assert {piece.name for piece in trainer.model.pieces() if piece.gradient is not None} == set()
        assert all(not value.any() for value in trainer.model.full_gradients().values())

    ranks(body, 2)


@pytest.mark.parametrize("loading", ["flat", "per-parameter"])
def test_the_state_of_a_parameter_without_dims_is_read_by_either_way(
    ranks: Ranks, tmp_path: Path, loading: str
) -> None:
    """Adam counts its steps in a tensor that has the shape of such a parameter."""

    def stepped_once(way: str) -> Trainer:
        more = {"ignored": ["first.weight", "scale"]} if way == "per-parameter" else {}
        trainer = Trainer(WAYS[way](Odd(), [], True, **more), of_sum, training.OPTIMIZERS["adam"], Options(8))
        trainer.step([MicroBatch(X, Y, range(4))])
        return trainer

    def saves(rank: int) -> None:
        trainer = stepped_once("per-parameter")
        state.save(tmp_path, trainer.model, trainer.optimizer)

    def loads(rank: int) -> None:
        trainer = stepped_once(loading)
        state.load(tmp_path, trainer.model, trainer.optimizer)
        assert trainer.optimizer is not None
        assert {float(own["step"]) for own in trainer.optimizer.state.values()} == {1.0}

    ranks(saves, 2)
    ranks(loads, 2)
