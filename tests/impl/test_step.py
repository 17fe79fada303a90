"""Whole steps against single-device autograd, on exact integers, bit for bit; and what a trainer refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.adapters._gather import local_tensors
from fsdpcheck.impl import clip, collectives
from fsdpcheck.impl.clipping import Flat
from fsdpcheck.impl.collectives import ALONE, Axis
from fsdpcheck.impl.layout import REPLICATED
from fsdpcheck.impl.modes import Mode
from fsdpcheck.impl.per_parameter import PerParameterModel
from fsdpcheck.impl.private import Norms, Privacy
from fsdpcheck.impl.step import MicroBatch, Moment, Options, Trainer
from fsdpcheck.impl.wrap import ShardedModel

if TYPE_CHECKING:
    from .conftest import Ranks

SIZES = {1: [4], 2: [3, 1], 3: [2, 0, 2], 4: [1, 0, 3, 0]}
"""Samples of each rank, by world size; four in all."""
UNITS = ["0", "1"]


def integers(*shape: int, seed: int, bound: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=generator).double()


def model(kind: str) -> nn.Sequential:
    first: nn.Module = nn.Embedding(5, 3, padding_idx=0) if kind == "tokens" else nn.Linear(3, 3)
    built = nn.Sequential(
        nn.Sequential(first, nn.LeakyReLU(0.5)), nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.5)), nn.Linear(5, 2)
    ).double()
    for seed, parameter in enumerate(built.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    if kind == "tokens":
        first.get_parameter("weight").data[0] = 0
    if kind == "frozen":
        built.get_parameter("0.0.bias").requires_grad_(False)
        built.get_parameter("1.0.weight").requires_grad_(False)
        built.get_parameter("2.weight").requires_grad_(False)
    return built


def flat(module: nn.Module, axis: Axis | None = None) -> ShardedModel:
    """Sharded in flat buffers over ``axis``, by default all ranks."""
    return ShardedModel(module, UNITS, axis or collectives.axis(), reshard_after_forward=True)


WAYS = {
    "flat": lambda module, reshard: ShardedModel(module, UNITS, collectives.axis(), reshard),
    "per-parameter": lambda module, reshard: PerParameterModel(
        module, UNITS, init_device_mesh("cpu", (collectives.axis().size,)), reshard
    ),
}


def inputs(kind: str) -> Tensor:
    if kind == "tokens":
        return torch.tensor([[1, 1, 4], [0, 2, 2], [3, 0, 3], [4, 4, 4]])
    return integers(4, 3, 3, seed=20) if kind == "sequence" else integers(4, 3, seed=20)


@dataclass(frozen=True)
class Loss:
    """0.5 * sum of squared errors of each sample, times ``scale`` (W, so that averages are exact)."""

    scale: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).flatten(1).square().sum(1) * self.scale


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.5, weight_decay=0.5, foreach=False)


def project(tensors: Iterable[Tensor]) -> None:
    """Back to small integers between steps, elementwise, so that the next step is exact again."""
    for tensor in tensors:
        tensor.detach().round_().clamp_(-2, 2)


@dataclass
class Single:
    """One device, one sample at a time."""

    norms: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def single_device(kind: str, scale: float, normaliser: int, steps: int = 2) -> Single:
    alone, x, loss = model(kind), inputs(kind), Loss(scale)
    trainable = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    optimizer = sgd(trainable.values())
    for step in range(steps):
        if step:
            project(trainable.values())
        squared = []
        total = {name: torch.zeros_like(p) for name, p in trainable.items()}
        for i in range(len(x)):
            output = alone(x[i : i + 1])
            found = torch.autograd.grad(loss(output, torch.zeros_like(output)).sum(), list(trainable.values()))
            squared.append(sum(float(g.square().sum()) for g in found))
            for name, gradient in zip(trainable, found, strict=True):
                total[name] += gradient
        for name, parameter in trainable.items():
            parameter.grad = total[name] / normaliser
        optimizer.step()
    gradients = {name: value / normaliser for name, value in total.items()}
    values = {name: p.detach() for name, p in alone.named_parameters()}
    return Single(torch.tensor(squared, dtype=torch.float64).sqrt(), gradients, values)


def micro_batches(x: Tensor, rows: list[int], count: int, outputs: Tensor) -> list[MicroBatch]:
    """Rows dealt out to ``count`` micro-batches, the later ones maybe empty."""
    return [
        MicroBatch(x[rows[k::count]], torch.zeros_like(outputs[rows[k::count]]), rows[k::count]) for k in range(count)
    ]


@dataclass
class Sharded:
    norms: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    indices: list[int]
    grad_norm: Tensor | None


def sharded(
    kind: str,
    rank: int,
    world_size: int,
    options: Options,
    count: int = 1,
    way: str = "flat",
    reshard: bool = True,
    steps: int = 2,
) -> Sharded:
    """``steps`` steps on this rank's rows."""
    with torch.no_grad():
        outputs = model(kind)(inputs(kind))
    trainer = Trainer(WAYS[way](model(kind), reshard), Loss(world_size), sgd, options)
    start = sum(SIZES[world_size][:rank])
    rows = list(range(4)) if options.layout == REPLICATED else list(range(start, start + SIZES[world_size][rank]))
    for step in range(steps):
        if step:
            project(local_tensors(trainer.model.shards()))
        trainer.step(micro_batches(inputs(kind), rows, count, outputs))
    found = trainer.found if options.privacy else Norms()
    norms = torch.cat(found.norms) if found.norms else torch.empty(0)
    values = trainer.model.full_values()
    return Sharded(norms, trainer.model.full_gradients(), values, found.indices, trainer.grad_norm)


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


KINDS = ["vector", "sequence", "tokens", "frozen"]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reshard", "sync_every", "count"), [(True, True, 1), (False, True, 2), (True, False, 3)])
def test_plain_steps(ranks: Ranks, kind: str, world_size: int, reshard: bool, sync_every: bool, count: int) -> None:
    options = Options(normaliser=2, sync_every=sync_every)
    wanted = single_device(kind, world_size, 2)
    for got in ranks(lambda rank: sharded(kind, rank, world_size, options, count, "flat", reshard), world_size):
        assert_equal(got.gradients, wanted.gradients)
        assert_equal(got.parameters, wanted.parameters)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", ["two_pass", "bookkeeping"])
@pytest.mark.parametrize(
    ("reshard", "timing", "count"), [(True, "immediate", 1), (False, "deferred", 1), (True, "deferred", 2)]
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


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contribution", ["complete", "partial", "mixed"])
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("timing", ["immediate", "deferred"])
@pytest.mark.parametrize("passes", ["two_pass", "bookkeeping"])
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
    factors = clip.factors(squared, 7.0)
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


def test_partial_contributions_need_a_replicated_batch() -> None:
    options = Options(normaliser=1, privacy=Privacy(Flat(1.0), contribution="partial"))
    with pytest.raises(ValueError, match="use complete contributions or a replicated batch"):
        Trainer(flat(model("vector"), ALONE), Loss(1), sgd, options)


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="micro-batches of zero rows"):
        private(nn.Linear(2, 2)).step([])
