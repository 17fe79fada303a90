"""Cases of samplers on ranks: what is no sampler is an error of the adapter; cases survive their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.case import Case, MeshSpec, of_kernel, of_sampler
from fsdpcheck.case.kernel import KernelSpec
from fsdpcheck.case.sampler import SamplingSpec
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import InvalidCase, UsageError
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


def test_a_case_that_trains_nothing_says_nothing_of_training(engine: SimulatedEngine) -> None:
    sampling = of_sampler(SamplingSpec(records=7, epochs=2, shards="replicated"), MeshSpec(3, 2), 5)
    assert Case.from_json(sampling.to_json()) == sampling
    assert sampling.requires() == {"hsdp", "replicated", "wrap-around"}
    assert not sampling.trains
    assert "7 records in shares of equal length" in sampling.describe()
    assert "sampling" not in Case(sampling.model).to_json()
    with pytest.raises(UsageError, match="trains nothing has no answer"):
        Run(engine, "reference").answer(sampling)
    with pytest.raises(InvalidCase, match="wanted one of them"):
        Case(sampling.model, sampling=sampling.sampling, kernel=KernelSpec())
    with pytest.raises(InvalidCase, match="where nothing is trained"):
        Case(sampling.model, MeshSpec(2), kernel=KernelSpec())
    with pytest.raises(InvalidCase, match=r"sampling\.rate"):
        of_sampler(SamplingSpec(rate=0.0), MeshSpec(), 0)
    with pytest.raises(InvalidCase, match=r"kernel\.bound"):
        of_kernel(KernelSpec(bound=0), 0)
    with pytest.raises(InvalidCase, match="spoiled"):
        of_kernel(KernelSpec(positions=0, spoil="nan"), 0)
