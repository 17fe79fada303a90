"""Names of modes, the environment that overrides them, profiles, and that a mode runs what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from fsdpcheck.adapters.training_loop import local
from fsdpcheck.impl.clipping import modes
from fsdpcheck.impl.clipping.modes import Mode, parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.costs.profile import Profile
from fsdpcheck.impl.norms import linear
from fsdpcheck.impl.trainer import MicroBatch
from tests.common.tables import each
from tests.impl.network import BOOKKEEPING, SIZES, X, Y, network, per_sample, stepped
from tests.impl.ways import WAYS

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


NAMES = [
    ("ghost", "ghost", "two_pass"),
    ("ghost_fsdp", "ghost", "two_pass"),
    ("flash", "flash", "two_pass"),
    ("flash_fsdp", "flash", "two_pass"),
    ("ghost_bk", "ghost", "bookkeeping"),
    ("ghost_fsdp_bk", "ghost", "bookkeeping"),
    ("flash_bk", "flash", "bookkeeping"),
    ("flash_fsdp_bk", "flash", "bookkeeping"),
    ("flash_bk_fsdp", "flash", "bookkeeping"),
]


@each(("name", "norms", "passes"), NAMES)
def test_the_usual_names(name: str, norms: str, passes: str) -> None:
    assert (parse(name).norms, parse(name).passes) == (norms, passes)


@pytest.mark.parametrize("name", ["", "hooks", "bk", "ghost_bk_bk", "ghost_ew", "fsdp_ghost"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="wanted ghost, flash, ghost_bk or flash_bk"):
        parse(name)


def test_the_environment_overrides_norms_and_passes_at_the_moment_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Mode(timing="deferred")
    monkeypatch.delenv(modes.ENVIRONMENT, raising=False)
    assert modes.in_force(mine) is mine
    monkeypatch.setenv(modes.ENVIRONMENT, "flash_bk")
    assert modes.in_force(mine) == Mode("flash", "bookkeeping", "deferred")


# -- profiles ----------------------------------------------------------------------------------------------------------


@each("name", ["ghost", "flash", "ghost_bk", "flash_bk"])
@each("timing", ["immediate", "deferred"])
@each("way", WAYS)
def test_a_profile_counts_parts_and_layers(ranks: Ranks, way: str, name: str, timing: Any) -> None:
    mode = parse(name, timing)

    def profiled(rank: int) -> Profile:
        profile = Profile(rank)
        stepped(way, rank, 2, Privacy(Flat(1.0), mode), X, profile)
        return profile

    for rank, profile in enumerate(ranks(profiled, 2)):
        entered = {part: times for part, times, _ in profile.table()}
        last = "second backward" if mode.passes == "two_pass" else "weighted gradients"
        parts = ["independence", "forward", "first backward", "aggregation", "clip factors"]
        assert {part: times for part, times in entered.items() if "/" not in part} == dict.fromkeys(
            [*parts, last, "reduction", "noise", "update"], 1
        )
        assert (entered["first backward/stack"], entered["clip factors/final"]) == (1, 1)
        assert profile.counts == {"layers with norms": 2}
        lines = profile.text().splitlines()
        assert len(lines) == 1 + len(entered) + 1
        assert lines[0].startswith(f"rank {rank} ")
        assert [line.split()[-2] for line in lines[1:-1]] == [str(times) for times in entered.values()]
        assert sum(times for part, times in entered.items() if "/norms of " in part) == 2
        events = profile.trace_events()
        assert {event["pid"] for event in events} == {rank}
        assert all(event["dur"] >= 0 and event["ph"] == "X" for event in events)


# -- modes that are really different -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["ghost", "flash"])
@pytest.mark.parametrize("passes", ["two_pass", "bookkeeping"])
def test_a_mode_runs_what_it_says(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, norms: Any, passes: Any) -> None:
    """Kernels are called in "flash" only, contractions in "bookkeeping" only; the bits are the same."""
    called: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            called.append(name)
            return original(*arguments)

        return call

    monkeypatch.setattr(linear, "flash_squared_norm", counted("flash", linear.flash_squared_norm))
    monkeypatch.setattr(linear, "squared_norm", counted("ghost", linear.squared_norm))
    monkeypatch.setattr(linear, "weighted_gradient", counted("bookkeeping", linear.weighted_gradient))

    def run(rank: int) -> dict[str, Tensor]:
        return stepped("flat", rank, 1, Privacy(Flat(2.0**40), Mode(norms, passes)), X).model.full_gradients()

    gradients = ranks(run, 1)[0]
    assert set(called) == {norms, *({"bookkeeping"} if passes == "bookkeeping" else ())}
    for name, gradient in gradients.items():
        assert torch.equal(gradient, sum(g[name] for g in per_sample(network(), X, Y)))  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_environment_decides_at_the_next_step(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, way: str, world_size: int
) -> None:
    """One trainer, a step under each name: what runs is what the name says, and every step releases the same bits."""
    ran: list[str] = []

    def noted(name: str, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            ran.append(name)
            return original(*arguments)

        return call

    for name in ("flash_squared_norm", "squared_norm", "weighted_gradient"):
        monkeypatch.setattr(linear, name, noted(name, getattr(linear, name)))

    def run(rank: int) -> list[dict[str, Tensor]]:
        trainer = stepped(way, rank, world_size, Privacy(Flat(2.0**40), BOOKKEEPING), X)
        released = []
        start = sum(SIZES[world_size][:rank])
        rows = list(range(start, start + SIZES[world_size][rank]))
        for name, norms, passes in NAMES:
            for shard in map(local, trainer.model.shards()):
                shard.zero_()  # every step from the same parameters
            monkeypatch.setenv(modes.ENVIRONMENT, name)
            ran.clear()
            trainer.step([MicroBatch(X[rows], Y[rows], rows)])
            if world_size == 1:
                kernel = "flash_squared_norm" if norms == "flash" else "squared_norm"
                assert set(ran) == {kernel, *(["weighted_gradient"] if passes == "bookkeeping" else [])}
            assert trainer.private is not None
            assert (trainer.private.mode.norms, trainer.private.mode.passes) == (norms, passes)
            released.append(trainer.model.full_gradients())
        return released

    for first, *others in ranks(run, world_size):
        assert any(bool(value.any()) for value in first.values())
        assert all(torch.equal(other[name], value) for other in others for name, value in first.items())
