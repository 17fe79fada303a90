"""Private steps with noise: the single device's bits at every W and either way of sharding; Poisson sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat, PerLayer
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.sampling.poisson import PoissonSampler, refuse_wrap_around
from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import every_pair
from tests.impl.ways import WAYS, integers

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

X, Y = integers(8, 3, seed=20), integers(8, 2, seed=21)
NOISE = gaussian.seeded(7)
CLIP = 2.0**40
"""Above every norm, so that the clipped sum is exact and steps differ by noise only."""


class Net(nn.Module):
    """A frozen bias, a weight with fewer rows than ranks, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.unused = nn.Linear(2, 3)
        self.first.bias.requires_grad_(False)
        self.double()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = integers(*parameter.shape, seed=seed)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu())


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def trainer(way: str, privacy: Privacy, normaliser: float = 4.0) -> Trainer:
    model = WAYS[way](Net(), ["first", "last", "unused"], True)
    return Trainer(model, loss, lambda p: torch.optim.SGD(p, lr=1.0), Options(normaliser, privacy=privacy))


def stepped(way: str, rank: int, world_size: int, privacy: Privacy, micro_batches: int = 1) -> dict[str, Tensor]:
    """Released gradients of a step on the rank's rows of X."""
    training = trainer(way, privacy)
    rows = [row for row in range(len(X)) if row % world_size == rank]
    parts = [rows[k::micro_batches] for k in range(micro_batches)]
    training.step([MicroBatch(X[own], Y[own], own) for own in parts])
    return training.model.full_gradients()


def noisy(multiplier: float, mode: Mode | None = None) -> Privacy:
    return Privacy(Flat(CLIP), mode or Mode(), noise_multiplier=multiplier, noise=NOISE)


@every_pair({"world_size": [1, 2, 3, 4, 5, 8], "way": WAYS, "passes": ["two_pass", "bookkeeping"]})
def test_noise_is_the_single_device_one(ranks: Ranks, way: str, world_size: int, passes: Any) -> None:
    """Noise of deviation multiplier * C / N on every trainable element, by name and position, added once."""
    multiplier = 2.0**-30
    clean = ranks(lambda rank: stepped("flat", 0, 1, noisy(0.0)), 1)[0]
    got = ranks(lambda rank: stepped(way, rank, world_size, noisy(multiplier, Mode(passes=passes)), 2), world_size)
    assert set(clean) == {name for name, p in Net().named_parameters() if p.requires_grad}
    for name, gradient in clean.items():
        drawn = NOISE.normal(name, 0, 0, gradient.numel(), multiplier * CLIP / 4, gradient.dtype, gradient.device)
        wanted = gradient + drawn.view(gradient.shape)
        assert bool((drawn != 0).all())
        for rank in range(world_size):
            assert torch.equal(got[rank][name], wanted), name


def test_every_step_has_noise_of_its_own_and_a_counter_that_resumes(ranks: Ranks) -> None:
    def three(rank: int) -> list[dict[str, Tensor]]:
        training, found = trainer("flat", noisy(1.0)), []
        for _ in range(3):
            training.step([MicroBatch(X[:0], Y[:0], [])])
            found.append(training.model.full_gradients())
        resumed = trainer("flat", noisy(1.0))
        resumed.model.steps_taken = 2
        resumed.step([MicroBatch(X[:0], Y[:0], [])])
        return [*found, resumed.model.full_gradients()]

    first, second, third, resumed = ranks(three, 1)[0]
    assert not torch.equal(first["first.weight"], second["first.weight"])
    assert not torch.equal(second["first.weight"], third["first.weight"])
    assert torch.equal(third["first.weight"], resumed["first.weight"])


def test_a_sensitivity_of_several_groups_scales_the_noise() -> None:
    rule = PerLayer({"first": 3.0, "": 4.0})
    privacy = Privacy(rule, Mode(passes="bookkeeping"), noise_multiplier=2.0, noise=NOISE)
    assert privacy.deviation(4) == 2.0 * 5.0 / 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Privacy(Flat(1.0), noise_multiplier=-1.0, noise=NOISE), "got noise_multiplier -1.0"),
        (lambda: Privacy(Flat(1.0), noise_multiplier=1.0), "no noise: make it by noise.secure"),
    ],
)
def test_bad_noise_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sample_twice_in_a_step_is_refused_unless_it_is_to_count(ranks: Ranks) -> None:
    def twice(rank: int) -> str:
        micro = MicroBatch(X[:1], Y[:1], [0])
        trainer("flat", Privacy(Flat(1.0), duplicates="count")).step([micro, micro])
        with pytest.raises(ValueError, match="sample 0 occurs more than once") as caught:
            trainer("flat", Privacy(Flat(1.0))).step([micro, micro])
        return str(caught.value)

    assert ranks(twice, 1)


# -- Poisson sampling -------------------------------------------------------------------------------------------------


def drawn(step: int, world_size: int, size: int = 50, rate: float = 0.3) -> list[list[list[int]]]:
    return [
        PoissonSampler(size, rate, 4, gaussian.seeded(3), Axis(None, rank, world_size)).draw(step)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 60])
def test_the_logical_batch_is_the_same_for_every_world_size(world_size: int) -> None:
    for step in range(20):
        alone, spread = drawn(step, 1), drawn(step, world_size)
        assert sorted(i for rank in spread for micro in rank for i in micro) == [i for micro in alone[0] for i in micro]
        assert {len(rank) for rank in spread} == {len(spread[0])}
        assert all(len(micro) <= 4 for rank in spread for micro in rank)


def test_records_join_by_themselves_at_the_rate() -> None:
    """1,000 steps of 50 records: the count of all, of each and of each pair within 6 standard deviations."""
    steps, rate = 1000, 0.3
    joined = torch.zeros(steps, 50, dtype=torch.float64)
    sampler = PoissonSampler(50, rate, 4, gaussian.seeded(3), Axis(None, 0, 1))
    for step in range(steps):
        joined[step, [i for micro in sampler.draw(step) for i in micro]] = 1
    pairs = (joined.T @ joined)[~torch.eye(50, dtype=torch.bool)]
    for counts, trials, chance in (
        (joined.sum(), steps * 50, rate),
        (joined.sum(0), steps, rate),
        (pairs, steps, rate**2),
    ):
        deviation = (trials * chance * (1 - chance)) ** 0.5
        assert bool(((counts - trials * chance).abs() < 6 * deviation).all())


def test_divisor_and_number_of_micro_batches_are_public() -> None:
    sampler = PoissonSampler(1000, 0.05, 16, gaussian.seeded(1), Axis(None, 0, 4))
    assert sampler.expected_batch_size == 50
    assert {len(sampler.draw(step)) for step in range(50)} == {sampler.micro_batches}


def test_too_little_room_is_an_error_not_a_loss() -> None:
    class Cramped(PoissonSampler):
        micro_batches = 1

    with pytest.raises(
        OverflowError, match=r"got 4\d records .* at most the 2 rows of 1 micro-batches; raise the capacity"
    ):
        Cramped(50, 0.9, 2, gaussian.seeded(1)).draw(0)


@pytest.mark.parametrize("bad", [(0, 0.5, 1), (5, 0.0, 1), (5, 1.5, 1), (5, 0.5, 0)])
def test_samplers_refuse_nonsense(bad: Any) -> None:
    with pytest.raises(ValueError, match="wanted positive numbers"):
        PoissonSampler(*bad, gaussian.seeded(1))


def test_wrap_around_is_refused() -> None:
    refuse_wrap_around(8, 4, drop_last=False)
    refuse_wrap_around(10, 4, drop_last=True)
    with pytest.raises(ValueError, match="repeats 2 of them"):
        refuse_wrap_around(10, 4, drop_last=False)
