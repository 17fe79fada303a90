"""A private training that is saved and loaded never draws a noise twice, whatever its owner remembers to pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from fsdpcheck.impl import state
from fsdpcheck.impl.clipping.modes import parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import every_pair
from tests.impl.network import X, Y, loss, network
from tests.impl.ways import WAYS, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

ROWS = {1: [4], 3: [2, 0, 2], 4: [1, 0, 3, 0]}


def trainer_of(way: str, mode: str) -> Trainer:
    privacy = Privacy(Flat(1.0), parse(mode), noise_multiplier=1.0, noise=gaussian.seeded(3))
    model = WAYS[way](network(), ["0", "1"], True)
    return Trainer(model, lambda y, t: 12 * loss(y, t), sgd, Options(normaliser=12, privacy=privacy))


def two_steps(trainer: Trainer, rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """What each of two steps releases. Rows are dyadic and clipped alone, so that sums do not depend on the ranks."""
    found = []
    for _ in range(2):
        start = sum(ROWS[world_size][:rank])
        rows = list(range(start, start + ROWS[world_size][rank]))
        trainer.step([MicroBatch(0 * X[rows], 0 * Y[rows], rows)])
        found.append(trainer.model.full_gradients())
    return found


def stopped(ranks: Ranks, folder: Path, way: str, mode: str, worlds: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """What a training releases that is saved after every two steps and goes on at the next number of ranks."""
    released: list[dict[str, Tensor]] = []
    for part, world_size in enumerate(worlds):

        def body(rank: int, part: int = part, world_size: int = world_size) -> list[dict[str, Tensor]]:
            trainer = trainer_of(way, mode)
            if part:
                state.load(folder / str(part), trainer.model, trainer.optimizer)
            found = two_steps(trainer, rank, world_size)
            state.save(folder / str(part + 1), trainer.model, trainer.optimizer)
            return found

        released += ranks(body, world_size)[0]
    return released


def repeated(released: list[dict[str, Tensor]]) -> list[tuple[int, int]]:
    """Pairs of steps that released the same numbers. Gradients are zero here, so these are the noise."""
    pairs = [(i, j) for i in range(len(released)) for j in range(i)]
    return [(i, j) for i, j in pairs if all(torch.equal(released[i][name], released[j][name]) for name in released[i])]


def never_stopped() -> list[dict[str, Tensor]]:
    """The noise of six steps by its definition."""
    named = list(network().named_parameters())
    drawn = gaussian.seeded(3)
    return [
        {n: drawn.normal(n, step, 0, p.numel(), 1 / 12, p.dtype, p.device).view(p.shape) for n, p in named}
        for step in range(6)
    ]


@pytest.fixture(autouse=True)
def no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of zero: what is released is the noise alone, at any number of ranks."""
    monkeypatch.setattr(Flat, "factors", lambda self, squared: torch.zeros_like(squared))


@every_pair({"way": WAYS, "norms": ["ghost", "flash"], "passes": ["", "_bk"]})
def test_noise_goes_on_where_it_stopped_though_nobody_passed_a_counter(
    ranks: Ranks, tmp_path: Path, way: str, norms: str, passes: str
) -> None:
    mode = norms + passes
    released = stopped(ranks, tmp_path / f"{way}-{mode}", way, mode, (4, 3, 1))
    for step, (got, wanted) in enumerate(zip(released, never_stopped(), strict=True)):
        for name, value in wanted.items():
            assert torch.equal(got[name], value), (step, name)


@pytest.mark.parametrize("way", WAYS)
def test_a_counter_that_is_left_behind_would_be_seen(
    ranks: Ranks, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the number of steps taken is not taken over."""
    monkeypatch.setattr(state, "count_on", lambda model, header: None)
    assert repeated(stopped(ranks, tmp_path, way, "ghost", (4, 3))) == [(2, 0), (3, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_loading_the_model_alone_brings_the_counter_too(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """As somebody does whose optimizer has no state worth keeping."""

    def body(rank: int) -> Any:
        trainer = trainer_of(way, "ghost")
        first = two_steps(trainer, rank, 3)
        state.save(tmp_path, trainer.model)
        again = trainer_of(way, "ghost")
        state.load(tmp_path, again.model)
        return [*first, *two_steps(again, rank, 3)]

    assert all(repeated(released) == [] for released in ranks(body, 3))


def test_two_trainers_of_one_model_share_its_counter() -> None:
    first = trainer_of("flat", "ghost")
    second = Trainer(first.model, loss, sgd, Options(normaliser=12))
    first.step([MicroBatch(X, Y, range(4))])
    assert (second.steps_taken, first.model.steps_taken) == (1, 1)
