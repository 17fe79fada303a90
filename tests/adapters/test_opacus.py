"""What is known to be wrong in Opacus, each with its smallest case and the numbers; and that the rest is sound.

These pin findings of one release: when one stops failing, Opacus was repaired, and KNOWN in its adapter gets shorter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import get_args

import pytest
import torch

from fsdpcheck import strategies
from fsdpcheck.adapters import load
from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    Clipping,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    SamplerCase,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.case.model import PaddingMode
from fsdpcheck.case.sampler import SamplingSpec
from fsdpcheck.case.validation import is_power_of_two
from fsdpcheck.checks.clipping import assert_norms_exact
from fsdpcheck.checks.noise_distribution import assert_noise_independent, assert_noise_scale, large
from fsdpcheck.checks.poisson import assert_poisson
from fsdpcheck.checks.samplers import assert_equal_steps
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings import tokens
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import bounds
from fsdpcheck.strategies import enumeration

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("opacus") is None or importlib.metadata.version("opacus") != "1.6.0",
    reason="the findings are those of opacus 1.6.0",
)
HERE = "fsdpcheck.adapters.builtin.opacus"
NO_ELEMENTS = "cannot reshape tensor of 0 elements"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = SimulatedEngine()
    yield made
    made.close()


def case(
    model: ModelSpec, counts: tuple[int, ...], clipping: Clipping = "unclipped", normaliser: int = 1
) -> TrainingCase:
    return TrainingCase(
        model,
        MeshSpec(dp_shard=len(counts)),
        BatchLayout("ragged", sum(counts), counts=counts),
        StepSpec(normaliser=normaliser, clipping=clipping),
        Arithmetic(project=False),
        seed=0,
    )


def test_no_bit_is_asked_of_a_quotient_that_rounds(engine: Engine) -> None:
    """7 ranks and N = 1: a gradient of -90 is divided by the float32 nearest to 1 / 7, which gives -89.99999."""
    one_each = case(ModelSpec((LayerSpec(7),)), (1,) * 7)
    run = Run(engine, f"{HERE}:sound")
    with pytest.raises(NotExact, match="divides by N / W = 1/7"):
        run.answer(one_each)
    for ranks, normaliser in ((7, 14), (4, 1), (1, 8)):
        run.answer(case(ModelSpec((LayerSpec(7),)), (1,) * ranks, normaliser=normaliser))
    drawn = enumeration.distinct(strategies.cases_of(strategies.PRIVATE_UNCLIPPED, run.features, (3, 4, 7)), 60)
    shares = {Fraction(each.step.normaliser, each.world_size).denominator for each in drawn}
    assert 1 in shares
    assert all(is_power_of_two(denominator) for denominator in shares)


def test_the_padding_row_counts_in_the_norm(engine: Engine) -> None:
    """Norm 3 = sqrt(5 + 2^2), where 2 is the gradient that nn.Embedding drops: the sample is clipped too hard."""
    tokens = ModelSpec((LayerSpec(1),), input="tokens", vocabulary=2, padding_idx=0)
    padded, run = case(tokens, (1,), clipping="probe"), Run(engine, f"{HERE}:padding_idx")
    with pytest.raises(Violation, match="norms are wrong") as found:
        assert_norms_exact(run(padded, observe={"norms"}), run.answer(padded))
    assert float(found.value.got) == 3.0
    assert run.answer(padded).steps[0].squared_norms.tolist() == [5.0]


@pytest.mark.parametrize("mode", get_args(PaddingMode))
def test_convolutions_are_taken_for_padded_with_zeros(engine: Engine, mode: PaddingMode) -> None:
    """Those of zeros are right, and no others."""
    signals = [
        case(
            ModelSpec((LayerSpec(2, kind="conv", kernel=3, padding=1, padding_mode=one),), "signal", 2, 3),
            (2,),
            "probe",
        )
        for one in (mode, "zeros")
    ]
    run = Run(engine, f"{HERE}:padding_mode")
    got, zeros = (run(each, observe={"norms"}) for each in signals)
    assert_norms_exact(zeros, run.answer(signals[1]))
    if mode == "zeros":
        return
    with pytest.raises(Violation, match="norms are wrong"):
        assert_norms_exact(got, run.answer(signals[0]))


THIRDS = (
    "v2:AAAAacrB7wN4-fgd9xKrRsqukBLVqhiYT0DKB1HuNaVX7jUiI_eaIHIvUqlISf6FhAsF2RdhN6EsbFKrQ1FpAok8Qg5CrvgIuQepSDGhT5ECqwI"
    "JlinwYnFYFitGVCxWYKELaeQpoTgXlqVqAR47hY0"
)
"""A rank of three samples: Opacus divides by three, and multiplies by three what attention and LayerNorm made of it."""


def test_a_third_of_a_loss_that_is_scaled_back_rounds_and_is_no_finding(engine: Engine) -> None:
    found = tokens.decode(THIRDS).case
    assert isinstance(found, TrainingCase)
    run = Run(engine, f"{HERE}:sound")
    answer, execution = run.answer(found), run(found, observe={"norms"})
    rooms = bounds.scaling_rooms(answer, answer.steps[1])
    assert all(0 < room < 2.0**-30 for room in rooms)
    assert_norms_exact(execution, answer)
    got, squared = float(execution.ranks[0].steps[1].norms[1]), Fraction(float(answer.steps[1].squared_norms[1]))
    exact, bound = bounds.square_root(squared), bounds.sample_norm_bound(answer)
    assert bound < abs(Fraction(got) - exact) / exact < 2 * bound
    halves = replace(found, layout=BatchLayout("contiguous", 4))
    assert not any(bounds.scaling_rooms(run.answer(halves), run.answer(halves).steps[0]))


@pytest.mark.parametrize(("rows", "ranks", "raises"), [(1, 2, True), (2, 2, False), (2, 3, True), (4, 3, False)])
def test_a_parameter_with_fewer_rows_than_ranks_cannot_step(
    engine: Engine, rows: int, ranks: int, raises: bool
) -> None:
    few = case(ModelSpec((LayerSpec(rows),)), (1,) * ranks, normaliser=ranks)
    run = Run(engine, f"{HERE}:few_rows")
    failure = run(few).failure
    assert (failure is not None) == raises
    if failure is not None:
        assert failure.kind == "raised"
        assert "in-place operations that require placement changes" in failure.text


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (ModelSpec((LayerSpec(2),), input="tokens"), NO_ELEMENTS),
        (ModelSpec((LayerSpec(2),), features=2, layer_norm=True), NO_ELEMENTS),
        (ModelSpec((LayerSpec(2, kind="rms_norm"),), features=2), NO_ELEMENTS),
        (
            ModelSpec((LayerSpec(2, True, kind="group_norm"),), "signal", length=2, features=2),
            NO_ELEMENTS,
        ),
        (ModelSpec((LayerSpec(2, kind="conv"), LayerSpec(2)), "signal"), "got mixed torch.Tensor and DTensor"),
        (ModelSpec((LayerSpec(2, bias=True),), features=2), ""),
    ],
    ids=["embedding", "layer-norm", "rms-norm", "group-norm", "conv", "linear"],
)
def test_a_rank_without_samples_raises_alone(engine: Engine, model: ModelSpec, text: str) -> None:
    """Poisson sampling makes such ranks; the others are left waiting in their next collective."""
    empty, run = case(model, (1, 0)), Run(engine, f"{HERE}:empty_ranks")
    execution = run(empty)
    if not text:
        assert_parameters_equal(execution, run.answer(empty))
        return
    assert execution.failure is not None
    assert text in execution.failure.text
    assert [state.state for state in execution.failure.ranks] == ["blocked", "raised"]


@pytest.mark.parametrize(
    ("which", "layers", "text"),
    [
        ("bags", (LayerSpec(2),), "not enough values to unpack (expected 2, got 1)"),
        ("unbiased", (LayerSpec(2, kind="layer_norm"),), "'NoneType' object has no attribute 'requires_grad'"),
        ("unbiased", (LayerSpec(2, True, kind="layer_norm"),), ""),
        ("sound", (LayerSpec(2, used="beside"),), "of which Opacus' norms know nothing"),
    ],
    ids=["bags", "layer-norm without bias", "layer-norm with bias", "weight beside"],
)
def test_a_layer_that_is_said_to_be_supported_raises(
    engine: Engine, which: str, layers: tuple[LayerSpec, ...], text: str
) -> None:
    model = ModelSpec(layers, "bags" if which == "bags" else "vector", features=2, vocabulary=2)
    run, unsupported = Run(engine, f"{HERE}:{which}"), case(model, (1, 1))
    execution = run(unsupported)
    assert (execution.failure is not None) == bool(text)
    if execution.failure is None:
        assert_parameters_equal(execution, run.answer(unsupported))
    else:
        assert text in execution.failure.text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_reduction_sum_is_divided_by_the_number_of_ranks(engine: Engine, ranks: int) -> None:
    """FSDP averages, and only loss_reduction "mean" accounts for it; noise is not divided, so it grows W-fold."""
    summed = case(ModelSpec((LayerSpec(4),), features=2), (1,) * ranks)
    run = Run(engine, f"{HERE}:summing")
    execution, answer = run(summed, observe={"grads"}), run.answer(summed)
    got = (execution.ranks[0].steps[0].grads or {})["tail.linear0.weight"]
    assert torch.equal(got * ranks, answer.steps[0].released["tail.linear0.weight"])
    assert got.any()
    if ranks > 1:
        with pytest.raises(Violation):
            assert_parameters_equal(execution, answer)


def test_poisson_sampling_leaves_out_steps_without_a_record(engine: Engine) -> None:
    """On one rank too: an FSDP2 module makes PrivacyEngine take the distributed sampler."""
    empty = SamplerCase(SamplingSpec("poisson", records=1, steps=8, rate=0.5), MeshSpec(), 0)
    asked, kept = (Run(engine, f"{HERE}:{name}")(empty) for name in ("poisson", "sound"))
    with pytest.raises(Violation, match="a rank takes another number of steps"):
        assert_equal_steps(asked)
    assert_equal_steps(kept)


def test_ranks_seeded_alike_draw_one_stream(engine: Engine) -> None:
    several = SamplerCase(SamplingSpec("poisson", records=4, steps=256, rate=0.5), MeshSpec(2), 0)
    with pytest.raises(Violation, match="ranks draw the same stream"):
        assert_poisson(Run(engine, f"{HERE}:one_stream")(several))
    assert_poisson(Run(engine, f"{HERE}:sound")(several))


def test_what_is_asked_of_noise_is_what_hangs_on_no_rounding_and_no_order_of_draws() -> None:
    features, laws = load(f"{HERE}:sound").features, chapters()
    for name in ("noise.once", "noise.scale", "noise.independent", "privacy.noise"):
        assert not laws[name].not_promised(features)
    for name in ("noise.world", "noise.micro-batches"):
        assert "one generator a rank" in laws[name].not_promised(features)
    assert "rounding is in its clip factors" in laws["privacy.independence"].not_promised(features)


def test_noise_is_of_the_scale_that_is_asked_for_on_every_number_of_ranks(engine: Engine) -> None:
    run = Run(engine, f"{HERE}:sound")
    for noisy in large(run.features, (1, 2, 3)):
        assert_noise_scale(run(noisy, observe={"grads"}), run.answer(noisy))
        assert_noise_independent(run(noisy, observe={"grads"}), run.answer(noisy))


@pytest.mark.parametrize("noise", ["a_little_less", "a_little_more", "twice", "as_asked"])
def test_noise_of_another_scale_is_found(noise: str, engine: Engine) -> None:
    run = Run(engine, f"tests/toys/noisier.py:{noise}")
    noisy, *_ = large(run.features, (2,))
    execution, answer = run(noisy, observe={"grads"}), run.answer(noisy)
    if noise == "as_asked":
        assert_noise_scale(execution, answer)
        return
    with pytest.raises(Violation, match="the noise has the wrong scale"):
        assert_noise_scale(execution, answer)
