"""Names of modes, the environment that overrides them, profiles, and that a mode runs what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from fsdpcheck.impl import modes
from fsdpcheck.impl.clipping import Flat
from fsdpcheck.impl.modes import Mode, parse
from fsdpcheck.impl.norms import linear
from fsdpcheck.impl.private import Privacy
from fsdpcheck.impl.profile import Profile
from fsdpcheck.impl.step import MicroBatch

from .network import BOOKKEEPING, X, Y, network, per_sample, stepped

if TYPE_CHECKING:
    from .conftest import Ranks


@pytest.mark.parametrize(
    ("name", "norms", "passes"),
    [
        ("ghost", "ghost", "two_pass"),
        ("flash_fsdp", "flash", "two_pass"),
        ("ghost_bk", "ghost", "bookkeeping"),
        ("ghost_fsdp_bk", "ghost", "bookkeeping"),
        ("flash_bk_fsdp", "flash", "bookkeeping"),
    ],
)
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


@pytest.mark.parametrize("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
def test_a_profile_counts_parts_and_layers(ranks: Ranks, mode: Mode) -> None:
    def profiled(rank: int) -> Profile:
        profile = Profile(rank)
        stepped("flat", rank, 2, Privacy(Flat(1.0), mode), X, profile)
        return profile

    for rank, profile in enumerate(ranks(profiled, 2)):
        entered = {part: times for part, times, _ in profile.table()}
        last = "second backward" if mode.passes == "two_pass" else "weighted gradients"
        assert {part: times for part, times in entered.items() if "/" not in part} == dict.fromkeys(
            ["forward", "first backward", "aggregation", "clip factors", last, "reduction", "noise", "update"], 1
        )
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


def test_the_environment_decides_at_the_next_step(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> list[str]:
        trainer = stepped("flat", rank, 1, Privacy(Flat(1.0)), X)
        assert trainer.private is not None
        seen = [trainer.private.mode.passes]
        for name in ("flash_bk_fsdp", "ghost"):
            monkeypatch.setenv(modes.ENVIRONMENT, name)
            trainer.step([MicroBatch(X, Y, [0, 1, 2, 3])])
            seen.append(trainer.private.mode.passes)
        return seen

    assert ranks(run, 1) == [["two_pass", "bookkeeping", "two_pass"]]
