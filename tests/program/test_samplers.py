"""Cases of samplers on ranks: what is no sampler is an error of the adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

TOYS = str(Path(__file__).parents[1] / "toys" / "samplers.py")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensors", "turn tensors into ints"),
        ("out_of_range", "of ints from 0 to"),
        ("bare_lists", "wanted  Drawn("),
    ],
)
def test_what_is_no_sampler_is_an_error_of_the_adapter(name: str, said: str, engine: SimulatedEngine) -> None:
    verdict = check_law(chapters()["samplers.dealt"], Run(engine, f"{TOYS}:{name}"), "quick")
    assert (verdict.status, verdict.exit_code) == ("error", 2)
    assert said in verdict.reason


@pytest.mark.parametrize("law", ["samplers.dealt", "samplers.steps"])
def test_a_sampler_that_hangs_is_a_finding(law: str, engine: SimulatedEngine) -> None:
    """Rank 0 calls a collective that no other rank calls."""
    verdict = check_law(chapters()[law], Run(engine, f"{TOYS}:lonely"), "quick")
    assert verdict.finding is not None
    assert verdict.finding.kind == "deadlock"
    assert verdict.finding.case["mesh"]["dp_shard"] == 2
