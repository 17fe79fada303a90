"""Whole steps against single-device autograd, on exact integers, bit for bit; and what a trainer refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.impl.clipping import clip_factors
from fsdpcheck.impl.clipping.batch_layout import REPLICATED
from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import ALONE
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.trainer import MicroBatch, Moment, Options, Trainer
from tests.common.tables import each, every_pair
from tests.impl.steps import (
    SIZES,
    WAYS,
    Loss,
    assert_equal,
    flat,
    inputs,
    micro_batches,
    model,
    sgd,
    sharded,
    single_device,
)

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

KINDS = ["vector", "sequence", "tokens", "frozen"]


@every_pair(
    {
        "kind": KINDS,
        "world_size": SIZES,
        "reshard, sync_every, count": [(True, True, 1), (False, True, 2), (True, False, 3)],
    }
)
def test_plain_steps(ranks: Ranks, kind: str, world_size: int, reshard: bool, sync_every: bool, count: int) -> None:
    options = Options(normaliser=2, sync_every=sync_every)
    wanted = single_device(kind, world_size, 2)
    for got in ranks(lambda rank: sharded(kind, rank, world_size, options, count, "flat", reshard), world_size):
        assert_equal(got.gradients, wanted.gradients)
        assert_equal(got.parameters, wanted.parameters)


@every_pair(
    {
        "kind": KINDS,
        "world_size": SIZES,
        "reshard, timing, count": [(True, "immediate", 1), (False, "deferred", 1), (True, "deferred", 2)],
        "way": WAYS,
        "passes": ["two_pass", "bookkeeping"],
    }
)
def test_private_steps_that_clip_nothing(
    ranks: Ranks, way: str, kind: str, world_size: int, reshard: bool, timing: Any, count: int, passes: Any
) -> None:
    options = Options(normaliser=2, privacy=Privacy(Flat(2.0**60), Mode(passes=passes, timing=timing)))
    wanted = single_device(kind, world_size, 2)
    for got in ranks(lambda rank: sharded(kind, rank, world_size, options, count, way, reshard), world_size):
        assert torch.equal(got.norms, wanted.norms[got.indices])
        assert_equal(got.gradients, wanted.gradients)
        assert_equal(got.parameters, wanted.parameters)


@every_pair({"kind": KINDS, "world_size": SIZES, "contribution": ["complete", "partial", "mixed"], "way": WAYS})
def test_replicated_batches(ranks: Ranks, way: str, kind: str, world_size: int, contribution: Any) -> None:
    options = Options(normaliser=2, privacy=Privacy(Flat(2.0**60), contribution=contribution), layout=REPLICATED)
    wanted = single_device(kind, world_size, 2)
    for got in ranks(lambda rank: sharded(kind, rank, world_size, options, 1, way), world_size):
        assert torch.equal(got.norms, wanted.norms)
        assert_equal(got.gradients, wanted.gradients)
        assert_equal(got.parameters, wanted.parameters)


ROWS = [[1, 1, 1, 1, 2, 2, 2, 0], [3, 1, 1, 1, 1, 1, 1, 1], [5, 3, 1, 1, 5, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0]]
"""Gradients of four samples whose norms 4, 4, 8 and 1 give dyadic factors."""


class Instrument(nn.Module):
    """Two layers whose per-sample gradients are exactly the targets of <output, target>."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(1, 4, bias=False), nn.Linear(1, 4, bias=False)])

    def forward(self, ones: Tensor) -> Tensor:
        return torch.cat([part(ones) for part in self.parts], 1)


@each("world_size", SIZES)
@each("timing", ["immediate", "deferred"])
@each("passes", ["two_pass", "bookkeeping"])
def test_clipped_steps_with_dyadic_factors(ranks: Ranks, world_size: int, passes: Any, timing: Any) -> None:
    scale = world_size * 2.0**40  # large enough for n + eps == n
    options = Options(normaliser=4, privacy=Privacy(Flat(2 * scale), Mode(passes=passes, timing=timing)))
    targets = torch.tensor(ROWS, dtype=torch.float64)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        module = Instrument().double()
        trainer = Trainer(
            ShardedModel(module, ["parts.0"], collectives.axis(), True),
            lambda y, t: (y * t).sum(1) * scale,
            sgd,
            options,
        )
        start = sum(SIZES[world_size][:rank])
        rows = list(range(start, start + SIZES[world_size][rank]))
        trainer.step([MicroBatch(torch.ones(len(rows), 1).double(), targets[rows], rows)])
        gradients = trainer.model.full_gradients()
        return torch.cat(trainer.found.factors), torch.cat([gradients[name] for name in sorted(gradients)]).flatten()

    wanted = torch.tensor([0.5, 0.5, 0.25, 1.0]).double()
    results = ranks(body, world_size)
    assert torch.equal(torch.cat([factors for factors, _ in results]), wanted)
    for _, gradient in results:
        assert torch.equal(gradient, (wanted.unsqueeze(1) * targets).sum(0) * scale / 4)


@pytest.mark.parametrize("world_size", SIZES)
def test_the_global_norm_is_that_of_the_whole_gradient(ranks: Ranks, world_size: int) -> None:
    options = Options(normaliser=1, max_grad_norm=3.0)
    plain = single_device("vector", world_size, 1, steps=1)
    norm = sum(g.square().sum() for g in plain.gradients.values()).sqrt()  # type: ignore[union-attr]
    for got in ranks(lambda rank: sharded("vector", rank, world_size, options, steps=1), world_size):
        assert torch.equal(got.grad_norm, norm)
        factor = torch.clamp(3.0 / (norm + 1e-6), max=1.0)
        assert_equal(got.gradients, {name: g * factor for name, g in plain.gradients.items()})


def padded(trainer: Trainer) -> list[Tensor]:
    """Live views of the padding of every parameter and gradient shard of this rank."""
    found = []
    for unit in trainer.model.units:
        for buffer in unit.buffers:
            shards = [buffer.shard.detach()] + ([] if buffer.shard.grad is None else [buffer.shard.grad.detach()])
            found += [shard[buffer.padding] for shard in shards]
    return found


def run_watched(rank: int, world_size: int, watch: Callable[[Trainer], None]) -> dict[str, Tensor]:
    """Two clipped steps with ``watch`` called at every moment and at the end; the parameters."""
    trainer: Trainer
    options = Options(normaliser=1, max_grad_norm=3.0)
    trainer = Trainer(flat(model("frozen")), Loss(world_size), sgd, options, notify=lambda moment: watch(trainer))
    watch(trainer)
    for _ in range(2):
        trainer.step(micro_batches(inputs("frozen"), [rank], 1, torch.zeros(4, 2).double()))
        watch(trainer)
    return trainer.model.full_values()


@pytest.mark.parametrize("world_size", [3, 4])
def test_padding_is_zero_at_every_moment(ranks: Ranks, world_size: int) -> None:
    seen: list[int] = []

    def watch(trainer: Trainer) -> None:
        for padding in padded(trainer):
            seen.append(len(padding))
            assert not padding.any()

    ranks(lambda rank: run_watched(rank, world_size, watch), world_size)
    assert max(seen) > 0


@pytest.mark.parametrize("world_size", [3, 4])
def test_padding_is_never_read(ranks: Ranks, world_size: int) -> None:
    def poison(trainer: Trainer) -> None:
        for padding in padded(trainer):
            padding.fill_(float("nan"))

    clean = ranks(lambda rank: run_watched(rank, world_size, lambda trainer: None), world_size)
    poisoned = ranks(lambda rank: run_watched(rank, world_size, poison), world_size)
    for got, wanted in zip(poisoned, clean, strict=True):
        assert_equal(got, wanted)


def test_a_sample_on_two_ranks_counts_twice(ranks: Ranks) -> None:
    def gradient(rank: int) -> dict[str, Tensor]:
        trainer = Trainer(flat(model("vector")), Loss(2), sgd, Options(normaliser=1))
        trainer.step(micro_batches(inputs("vector"), [0, 1] if rank == 0 else [1, 2], 1, torch.zeros(4, 2).double()))
        return trainer.model.full_gradients()

    alone = Trainer(flat(model("vector"), ALONE), Loss(2), sgd, Options(normaliser=1))
    alone.step(micro_batches(inputs("vector"), [0, 1, 1, 2], 1, torch.zeros(4, 2).double()))
    for got in ranks(gradient, 2):
        assert_equal(got, alone.model.full_gradients())


@each("privacy", [None, Privacy(Flat(2.0**60))])
def test_ranks_may_have_unequal_numbers_of_micro_batches(ranks: Ranks, privacy: Privacy | None) -> None:
    shares = {0: ([0], 1), 1: ([1, 2, 3], 3), 2: ([], 2)}

    def trained(rank: int) -> dict[str, Tensor]:
        options = Options(normaliser=4, privacy=privacy, sync_every=False, unequal_micro_batches=True)
        trainer = Trainer(flat(model("vector")), Loss(3), sgd, options)
        samples, count = shares[rank]
        trainer.step(micro_batches(inputs("vector"), samples, count, torch.zeros(4, 2).double()))
        return trainer.model.full_gradients()

    alone = Trainer(flat(model("vector"), ALONE), Loss(3), sgd, Options(normaliser=4))
    alone.step(micro_batches(inputs("vector"), [0, 1, 2, 3], 1, torch.zeros(4, 2).double()))
    for got in ranks(trained, 3):
        assert_equal(got, alone.model.full_gradients())
    assert [ranks.trace(rank) for rank in range(3)] == [ranks.trace(0)] * 3


def test_every_rank_issues_the_same_collectives_with_or_without_rows(ranks: Ranks) -> None:
    ranks(lambda rank: sharded("sequence", rank, 4, Options(normaliser=1, privacy=Privacy(Flat(1.0))), count=2), 4)
    assert ranks.trace(0)
    assert [ranks.trace(rank) for rank in range(4)] == [ranks.trace(0)] * 4


def test_the_moments_of_a_private_step() -> None:
    seen: list[Moment] = []
    options = Options(normaliser=1, privacy=Privacy(Flat(1.0)), sync_every=False)
    trainer = Trainer(flat(model("vector"), ALONE), Loss(1), sgd, options, notify=seen.append)
    trainer.step(micro_batches(inputs("vector"), [0, 1, 2], 2, torch.zeros(4, 2).double()))
    first = ["after_forward", "after_first_backward", "after_norms"]
    assert seen == [*first, "after_reshard", *first, "after_reduce", "after_reshard", "before_step"]


def test_the_first_backward_forms_no_weight_gradient() -> None:
    def check(moment: Moment) -> None:
        if moment == "after_norms":
            assert all(parameter.grad is None for parameter in module.parameters())

    module = model("vector")
    trainer = Trainer(
        flat(module, ALONE), Loss(1), sgd, Options(normaliser=1, privacy=Privacy(Flat(1.0))), notify=check
    )
    trainer.step(micro_batches(inputs("vector"), [0, 1], 1, torch.zeros(4, 2).double()))
    assert all(shard.grad is not None for shard in trainer.model.shards())


def test_a_factor_never_lets_a_norm_above_the_clip_norm() -> None:
    squared = torch.arange(0, 4000, dtype=torch.float64)
    factors = clip_factors.factors(squared, 7.0)
    assert bool((factors * squared.sqrt() <= 7.0).all())
    assert bool((factors[squared < 48] == 1).all())


# -- what is refused -------------------------------------------------------------------------------------------------


def private(module: nn.Module) -> Trainer:
    alone = ShardedModel(module, [], ALONE, True)
    return Trainer(alone, lambda y, t: y.sum(1), sgd, Options(normaliser=1, privacy=Privacy(Flat(1.0))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1 is a BatchNorm1d: it mixes the samples"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), "0: max_norm changes the weight"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0: sparse gradients"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True)), "0: scale_grad_by_freq"),
    ],
)
def test_private_training_refuses(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        private(make())


def test_frozen_layers_need_no_norm_rule() -> None:
    module = nn.Sequential(nn.Conv1d(1, 1, 1).requires_grad_(False), nn.Flatten(), nn.Linear(2, 2))
    private(module).step([MicroBatch(torch.ones(3, 1, 2), torch.ones(3), [0, 1, 2])])


def test_a_forward_outside_a_step_does_not_disturb_the_next_step() -> None:
    trainer = private(nn.Linear(2, 2))
    trainer.model(torch.ones(3, 2))
    trainer.step([MicroBatch(torch.ones(1, 2), torch.ones(1), [0])])
    assert len(trainer.found.norms[0]) == 1


def test_an_output_changed_in_place_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the output of 0 was changed in place"):
        private(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))).step(
            [MicroBatch(torch.ones(1, 2), torch.ones(1), [0])]
        )


@pytest.mark.parametrize("passes", ["two_pass", "bookkeeping"])
@pytest.mark.parametrize("frozen", ["", "weight"])
def test_an_input_changed_in_place_is_refused_where_it_counts(passes: Any, frozen: str) -> None:
    """Autograd sees it in the backward to weights, which bookkeeping does not take. A bias needs no input."""

    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y: Tensor = self.layer(x)
            x.add_(1)
            return y

    module = Shifting().double()
    if frozen:
        module.layer.weight.requires_grad_(False)
    alone = ShardedModel(module, [], ALONE, True)
    options = Options(normaliser=1, privacy=Privacy(Flat(1.0), Mode(passes=passes)))
    trainer = Trainer(alone, lambda y, t: y.sum(1), sgd, options)
    batch = [MicroBatch(torch.ones(1, 2).double(), torch.ones(1), [0])]
    if frozen:
        trainer.step(batch)
        assert torch.equal(trainer.found.norms[0], torch.tensor([2.0]).double().sqrt())
    else:
        with pytest.raises(RuntimeError, match="an input of layer was changed in place after its forward: its norm"):
            trainer.step(batch)


def test_partial_contributions_need_a_replicated_batch() -> None:
    options = Options(normaliser=1, privacy=Privacy(Flat(1.0), contribution="partial"))
    with pytest.raises(ValueError, match="use complete contributions or a replicated batch"):
        Trainer(flat(model("vector"), ALONE), Loss(1), sgd, options)


@pytest.mark.parametrize("value", [0.0, -4.0, float("nan")])
@pytest.mark.parametrize("name", ["normaliser", "max_grad_norm"])
def test_numbers_that_would_turn_or_lose_the_gradient_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"got Options.{name} {value}, wanted a positive"):
        Options(**{"normaliser": 1.0, name: value})  # type: ignore[arg-type]


def test_an_infinite_bound_clips_nothing_and_an_infinite_divisor_is_refused() -> None:
    Options(normaliser=1.0, max_grad_norm=float("inf"))
    with pytest.raises(ValueError, match=r"got Options\.normaliser inf"):
        Options(normaliser=float("inf"))


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="micro-batches of zero rows"):
        private(nn.Linear(2, 2)).step([])
