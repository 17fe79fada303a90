"""The noise of the reference: laws meet both of its generators, as the case says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.noise import noisy
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.judging.run import Run

CASE = noisy(
    TrainingCase(
        ModelSpec((LayerSpec(3),), features=2),
        MeshSpec(2),
        BatchLayout("contiguous", 4),
        StepSpec(normaliser=1, clipping="unclipped"),
    )
)
WEIGHT = "tail.linear0.weight"


@pytest.mark.parametrize("adapter", ["reference", "reference_fsdp2"])
@pytest.mark.parametrize(("secure", "generator"), [(False, "philox"), (True, "chacha20")])
def test_noise_is_that_of_the_generator_that_the_case_names(
    secure: bool, generator: str, adapter: str, engine: SimulatedEngine
) -> None:
    run, seed = Run(engine, adapter), 512 + 7
    named = replace(CASE, step=replace(CASE.step, secure_noise=secure))
    clean = replace(CASE, step=replace(CASE.step, noise_multiplier=0.0))
    with_noise, without = (run(case, {"grads"}, noise_seed=seed).ranks[0].steps[0].grads for case in (named, clean))
    assert with_noise is not None
    assert without is not None
    noise = replace(gaussian.seeded(seed), generator=generator)
    deviation = CASE.step.noise_multiplier * run.answer(CASE).clip_norm
    wanted = noise.normal(WEIGHT, 0, 0, 6, deviation, torch.float64, torch.device("cpu")).view(3, 2)
    assert torch.equal(with_noise[WEIGHT], without[WEIGHT] + wanted)
