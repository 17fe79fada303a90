"""Opacus over its own data parallelism: its laws hold, and its known finding is found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("opacus") is None or importlib.metadata.version("opacus") != "1.6.0",
    reason="the findings are those of opacus 1.6.0",
)
ONE_ROW = TrainingCase(
    ModelSpec((LayerSpec(1, bias=True),), features=2),
    MeshSpec(2),
    BatchLayout("ragged", 4, counts=(3, 1)),
    StepSpec(normaliser=2, clipping="unclipped"),
)


@pytest.mark.parametrize("law", ["training.private-unclipped", "clipping.sum", "collectives.private", "noise.once"])
@pytest.mark.parametrize("name", ["opacus_ddp", "opacus_ddp:ghost"])
def test_the_laws_of_private_training_hold(name: str, law: str, engine: SimulatedEngine) -> None:
    run = Run(engine, name)
    if reason := chapters()[law].not_promised(run.features):
        pytest.skip(reason)
    verdict = check_law(chapters()[law], run, world_sizes=(2, 3), most=6)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize("name", ["opacus_ddp", "opacus_ddp:ghost"])
def test_fewer_rows_than_ranks_are_no_matter_to_whole_parameters(name: str, engine: SimulatedEngine) -> None:
    run = Run(engine, name)
    assert_parameters_equal(run(ONE_ROW), run.answer(ONE_ROW))


def test_the_padding_row_is_trained_by_gradients_of_samples_alone(engine: SimulatedEngine) -> None:
    """Ghost clipping counts that row in its norms, and leaves the gradient itself to autograd, which drops it."""
    tokens: Any = ModelSpec((LayerSpec(1),), input="tokens", vocabulary=2, padding_idx=0)
    padded = replace(ONE_ROW, model=tokens, mesh=MeshSpec(1), layout=BatchLayout(batch_size=2))
    run = Run(engine, "opacus_ddp:padding_idx")
    with pytest.raises(Violation, match=r"(?s)the parameters are not.*embedding\.weight"):
        assert_parameters_equal(run(padded), run.answer(padded))
    run = Run(engine, "opacus_ddp:ghost")
    assert_parameters_equal(run(padded), run.answer(padded))
