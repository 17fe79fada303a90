"""The models of docs/examples hold: a small GPT of ordinary modules, and GPT-2 where transformers is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.engines.base import Engine
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.session import faults
from fsdpcheck.workload.user_model import inspection

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LAWS = [
    ("fully_shard", "training.plain", "tier exact"),
    ("reference", "clipping.sum", "tier exact"),
    ("fully_shard", "rounding.gradients", "tier replay"),
]
"""A plain and a private law on integers, and one on the model's own weights."""

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="only a checkout has the examples")


def _judged(engine: Engine, model: str, adapter: str, law: str, *installs: str) -> Verdict:
    """The law on two cases of the example's model, on two ranks, with these faults planted."""
    file = EXAMPLES / f"{model}.py"
    seen = inspection.inspect(f"{file}:build", f"{file}:batch")
    avoid = seen.left_out(law.startswith("rounding."))
    run = Run(engine, adapter, tuple(map(faults.resolved, installs)), own=seen.own, avoid=avoid)
    return check_law(chapters()[law], run, world_sizes=(2,), most=2, shrink=False)


@pytest.mark.parametrize(("adapter", "law", "tier"), LAWS)
def test_the_small_gpt_holds(adapter: str, law: str, tier: str, engine: Engine) -> None:
    verdict = _judged(engine, "small_gpt", adapter, law)
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census[tier] == 2


@pytest.mark.parametrize("law", [pytest.param("clipping.sum", marks=pytest.mark.nightly), "rounding.gradients"])
def test_a_fault_is_found_on_the_small_gpt(law: str, engine: Engine) -> None:
    verdict = _judged(engine, "small_gpt", "reference", law, "averaged_twice")
    assert verdict.status == "finding"


@pytest.mark.parametrize(("adapter", "law", "tier"), [*LAWS, ("reference", "features.checkpointing", "tier exact")])
def test_gpt2_of_transformers_holds(adapter: str, law: str, tier: str, engine: Engine) -> None:
    pytest.importorskip("transformers")
    verdict = _judged(engine, "gpt2", adapter, law)
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census[tier] == 2
