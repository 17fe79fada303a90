"""Names of modes, and the environment that overrides them."""

from __future__ import annotations

import pytest

from fsdpcheck.impl import modes
from fsdpcheck.impl.modes import Mode, parse


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
