"""Low precision: what is proved exact in few bits has the bits of float64 there; most of what is drawn is proved."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters import load
from fsdpcheck.adapters.builtin import _fsdp2_features as _fsdp2
from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    Clipping,
    Compute,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
    Trait,
)
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import certificate, standards
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import batches, models, numerics
from tests.common.answers import proved

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)))
SMALL = TrainingCase(
    ModelSpec((LayerSpec(2), LayerSpec(2)), features=2),
    arithmetic=Arithmetic("float32", project=False, compute="bfloat16"),
)


CASES = 24
"""Cases that are computed anew of each family and type; to compute one takes longer than to prove it."""


@cache
def cases(compute: Compute, clipping: Clipping, worlds: tuple[int, ...], count: int) -> tuple[TrainingCase, ...]:
    space = strategies.LOW_PRECISION.but(clipping=(clipping,), compute=compute)
    return tuple(enumeration.distinct(strategies.cases_of(space, EVERYTHING, worlds), count))


def drawn(
    compute: Compute, clipping: Clipping, worlds: tuple[int, ...], count: int
) -> tuple[tuple[TrainingCase, oracle.Answer | None], ...]:
    return tuple((case, proved(case)) for case in cases(compute, clipping, worlds, count))


class Tf32(TorchDispatchMode):
    """Rounds the factors of every product of matrices to 11 bits, as a GPU does that may; sums stay in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"):
            args = tuple(_rounded(value) if isinstance(value, Tensor) else value for value in args)
        return func(*args, **(kwargs or {}))


def _rounded(value: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def shares(case: TrainingCase, step: oracle.StepAnswer, k: int, draw: random.Random) -> list[list[int]]:
    """The rows of ``step`` of every micro-batch of every rank, each cut in two at random."""
    found = []
    for chunk in (chunk for chunks in batches.indices(case, k) for chunk in chunks):
        rows = [step.samples.index(sample) for sample in chunk]
        cut = draw.randint(0, len(rows))
        found += [rows[:cut], rows[cut:]]
    return found


def trained_alone(
    case: TrainingCase, answer: oracle.Answer, k: int, reduced: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The released gradient of step k if each share computes as the case says, and shares are added in ``reduced``."""
    step, compute = answer.steps[k], case.arithmetic.compute
    copies = case.world_size if case.layout.kind == "replicated" else 1
    total = {name: torch.zeros_like(value, dtype=reduced) for name, value in step.released.items()}
    model = models.build(case)
    model.load_state_dict(step.before, strict=False)
    model = model.to(torch.bfloat16 if compute == "bfloat16" else torch.float32)
    for rows in shares(case, step, k, random.Random(case.seed)):
        model.zero_grad()
        samples = [step.samples[row] for row in rows]
        inputs = batches.inputs(case)[samples]
        inputs = inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs
        packed = torch.cat([batches.targets(case)[samples], step.targets[rows].float()], 1)
        with Tf32():
            losses = models.loss_for(case)(model(inputs).float(), packed)
            (losses @ step.factors[rows] * (case.world_size / copies / case.step.normaliser)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name in total:
                total[name] += parameter.grad.to(reduced)
    return {name: value.float() / case.world_size for name, value in total.items()}


def wrong(case: TrainingCase, answer: oracle.Answer, reduced: torch.dtype = torch.float32) -> bool:
    """Whether some step's gradient, computed so, is not the answer's."""
    for k, step in enumerate(answer.steps):
        found = trained_alone(case, answer, k, reduced)
        if any(not torch.equal(found[name], value) for name, value in step.released.items()):
            return True
    return False


@pytest.mark.parametrize("compute", ["bfloat16", pytest.param("tf32", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "family", [*(pytest.param(one, marks=pytest.mark.nightly) for one in ("none", "unclipped")), "exact"]
)
def test_what_is_proved_has_the_bits_of_float64(family: Clipping, compute: Compute) -> None:
    found = [(case, answer) for case, answer in drawn(compute, family, (1, 2, 3, 4, 5), CASES) if answer is not None]
    assert len(found) >= 0.75 * CASES
    assert not [case.describe() for case, answer in found if wrong(case, answer)]
    assert sum(any(bool(g.any()) for g in answer.steps[0].released.values()) for _, answer in found) > 0.5 * CASES


@pytest.mark.parametrize(
    ("compute", "inputs"), [("bfloat16", 90), pytest.param("tf32", 3000, marks=pytest.mark.nightly)]
)
def test_what_rounds_is_refused(compute: Compute, inputs: int) -> None:
    """The control: the same cases with larger numbers, exact in float32. Some round there, and none of them passes."""
    rounded = 0
    for case in cases(compute, "none", (1, 2, 3, 4, 5), CASES):
        wide = replace(case, arithmetic=replace(case.arithmetic, inputs=inputs))
        answer = proved(replace(wide, arithmetic=replace(wide.arithmetic, compute="dtype")))
        if answer is not None and wrong(wide, answer):
            rounded += 1
            assert proved(wide) is None, wide.describe()
    assert rounded > 0.2 * CASES


def test_what_reaches_the_instrument_is_a_factor_too() -> None:
    """Twelve bits of it do: a product in TF32 rounds them, though nothing else of the case needs more than eleven."""
    case = TrainingCase(
        ModelSpec((LayerSpec(3, bias=True),), "sequence", units=()),
        MeshSpec(1, 5),
        BatchLayout("sampler", 3, shuffle=True),
        StepSpec("l1", 1, 2, True, 20, "sum", "exact", 2, "deferred", optimizer=OptimizerSpec("adamw", 1)),
        Arithmetic("float32", weights=1, inputs=81, project=False, compute="tf32"),
        seed=1214,
    )
    answer = proved(replace(case, arithmetic=replace(case.arithmetic, compute="dtype")))
    assert answer is not None
    assert wrong(case, answer)
    with pytest.raises(NotExact, match=r"what reaches instrument\.weight: needs 12 bits as a factor; had 11"):
        certificate.prove(case, answer)


@pytest.mark.nightly
def test_a_sum_over_ranks_may_need_more_bits_than_bfloat16_has() -> None:
    """So often that a law sees a reduction in bfloat16 in nearly every run of the ci profile, which has 60 cases."""
    found = [(case, answer) for case, answer in drawn("bfloat16", "none", (2, 3, 4, 5), 60) if answer is not None]
    assert sum(wrong(case, answer, torch.bfloat16) for case, answer in found) >= 5


def added_up_in_bfloat16(case: TrainingCase, step: oracle.StepAnswer, k: int) -> dict[str, Tensor]:
    """The released gradient of step k, exact but for each rank's micro-batches, which are added up in bfloat16."""
    total = {name: torch.zeros(value.shape[1:], dtype=torch.float64) for name, value in step.gradients.items()}
    share = case.world_size // case.copies / case.step.normaliser
    for chunks in batches.indices(case, k):
        for name, gradient in step.gradients.items():
            parts = [
                sum(
                    (step.factors[row].double() * gradient[row] for row in map(step.samples.index, chunk)),
                    0 * total[name],
                )
                for chunk in chunks
            ]
            own = parts[0] * share
            for part in parts[1:]:
                own = (own + part * share).to(torch.bfloat16).double()
            total[name] += own / case.world_size
    return {name: value.float() for name, value in total.items()}


@pytest.mark.nightly
def test_a_sum_over_micro_batches_may_need_more_bits_than_bfloat16_has() -> None:
    """So often that a law sees micro-batches added up in bfloat16 in nearly every run of the ci profile."""
    every = cases("bfloat16", "none", (2, 3, 4, 5), 60)
    put_off = [(case, answer) for case in every if not case.step.sync_every and (answer := proved(case)) is not None]
    assert sum(_differs(added_up_in_bfloat16(case, answer.steps[0], 0), answer) for case, answer in put_off) >= 5
    alone = [case for case in every if case.step.micro_batches == 1]
    once = [(case, answer) for case in alone if (answer := proved(case)) is not None]
    assert not [case for case, answer in once if _differs(added_up_in_bfloat16(case, answer.steps[0], 0), answer)]


def _differs(got: dict[str, Tensor], answer: oracle.Answer) -> bool:
    return any(not torch.equal(got[name], value) for name, value in answer.steps[0].released.items())


def test_most_clipped_cases_are_proved_and_clip_some_samples_only() -> None:
    """A sample is clipped in each of them, by a power of two, and in half of them not every sample alike."""
    every = drawn("bfloat16", "exact", (1, 2, 3, 4, 5), 40)
    found = [answer.steps[0].factors for _, answer in every if answer is not None]
    assert len(found) >= 32
    clipped = [factors for factors in found if bool((factors < 1).any())]
    assert len(clipped) >= 30
    assert all(bool((torch.frexp(factors)[0] == 0.5).all()) for factors in clipped)
    assert sum(len(factors.unique()) > 1 for factors in clipped) >= 15


@pytest.mark.nightly
def test_factors_of_any_size_are_drawn_and_most_need_more_bits_than_bfloat16_has() -> None:
    found = [answer for _, answer in drawn("bfloat16", "probe", (1, 2, 3, 4, 5), 40) if answer is not None]
    assert len(found) >= 32
    factors = [answer.steps[0].factors for answer in found]
    assert sum(bool((own != own.to(torch.bfloat16)).any()) for own in factors) >= 15


def test_thirteen_replicas_leave_a_clip_norm() -> None:
    """The loss scale's odd factor is 169 there, more than a target of 8 bits can take."""
    every = enumeration.distinct(
        strategies.cases_of(strategies.LOW_PRECISION.but(clipping=("exact",)), EVERYTHING, (13,)), 60
    )
    assert any(case.mesh.dp_replicate == 13 for case in every)
    assert all(case.step.clip_norm >= 1 for case in every)


def test_a_batch_is_not_dealt_out_where_norms_are_partial() -> None:
    """Their shares could not be put together: every private implementation refuses such a case."""
    strategy = strategies.cases_of(strategies.LOW_PRECISION.but(clipping=("unclipped",)), EVERYTHING, (2, 3, 4, 5))
    partial = [case for case in enumeration.distinct(strategy, 150) if case.step.contribution != "complete"]
    assert len(partial) >= 5
    assert {case.layout.kind for case in partial} == {"replicated"}


@pytest.mark.nightly
@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize(
    ("compute", "family"),
    [("bfloat16", "none"), ("tf32", "none"), ("bfloat16", "exact"), ("tf32", "exact"), ("bfloat16", "probe")],
)
def test_most_of_what_is_drawn_is_proved(compute: Compute, family: Clipping, world: int) -> None:
    accepted = [answer is not None for _, answer in drawn(compute, family, (world,), 100)]
    assert sum(accepted) >= 80


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arithmetic": replace(SMALL.arithmetic, inputs=1000)}, "step 0, rank 0 in bfloat16, inputs: needs"),
        (
            {
                "model": ModelSpec((LayerSpec(4),)),
                "step": StepSpec("linear"),
                "arithmetic": replace(SMALL.arithmetic, weights=1000),
            },
            r"linear0.weight: needs \d+ bits; had 8",
        ),
        ({"model": ModelSpec((LayerSpec(2, activation="gelu"),))}, "bfloat16: surrogates on no grid of few bits"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    case = replace(SMALL, **changes)
    with pytest.raises(NotExact, match=said):
        certificate.prove(case, oracle.answer(case))


def test_a_case_that_fits_says_how_many_bits_it_takes() -> None:
    used = certificate.prove(SMALL, oracle.answer(SMALL))
    assert 0 < used["gradient of tail.linear0.weight"] <= 8
    assert 0 < used["inputs"] <= 2


def test_the_tier_is_one_of_its_own_and_every_bit_counts() -> None:
    rule = load("reference").features.factor
    assert standards.of(SMALL, rule) == "low precision"
    assert standards.every_bit("low precision")
    assert standards.of(replace(SMALL, arithmetic=Arithmetic("float32")), rule) == "exact"


@pytest.mark.parametrize(("compute", "tf32"), [("dtype", False), ("bfloat16", False), ("tf32", True)])
def test_what_a_gpu_may_round_is_set_for_the_run_and_put_back(compute: Compute, tf32: bool) -> None:
    """In all cases, for convolutions may round to TF32 by default, and products may add up in few bits."""
    before = numerics.switches()
    assert before == {
        "products: allow_tf32": False,
        "convolutions: allow_tf32": True,
        "products: allow_bf16_reduced_precision_reduction": True,
        "products: allow_fp16_reduced_precision_reduction": True,
    }
    with numerics.of(replace(SMALL, arithmetic=replace(SMALL.arithmetic, compute=compute))):
        assert numerics.switches() == {
            "products: allow_tf32": tf32,
            "convolutions: allow_tf32": tf32,
            "products: allow_bf16_reduced_precision_reduction": False,
            "products: allow_fp16_reduced_precision_reduction": False,
        }
    assert numerics.switches() == before


@contextmanager
def reduced_in_bfloat16() -> Iterator[None]:
    """``fully_shard`` told to reduce in the dtype it computes in: a policy that users write."""
    right = _fsdp2.policy
    _fsdp2.policy = lambda compute: MixedPrecisionPolicy(compute, compute)
    try:
        yield
    finally:
        _fsdp2.policy = right


def test_a_policy_that_reduces_in_bfloat16_is_seen() -> None:
    """Three ranks have gradients of at most 252, which are bfloat16 numbers; their sum 351 is none."""
    case = replace(
        SMALL,
        model=ModelSpec((LayerSpec(2),), features=2, units=(1,)),
        mesh=MeshSpec(3),
        layout=BatchLayout("contiguous", 3),
        step=StepSpec("l1", normaliser=3),
        arithmetic=replace(SMALL.arithmetic, inputs=84),
        seed=0,
    )
    answer = proved(case)
    assert answer is not None
    assert wrong(case, answer, torch.bfloat16)
    engine = InProcessEngine()
    run = Run(engine, "fully_shard").watching(["grads"])
    assert_gradients_equal(run(case), answer)
    with reduced_in_bfloat16(), pytest.raises(Violation, match="the gradient is not the single device's"):
        assert_gradients_equal(run(case), answer)
    engine.close()


@pytest.mark.parametrize("ref", ["reference", "reference_fsdp2", "fully_shard", "fsdp1"])
def test_every_adapter_computes_in_bfloat16(ref: str) -> None:
    """The model is run in bfloat16, not only its law drawn: its outputs show it."""
    case = replace(
        SMALL,
        model=replace(SMALL.model, units=(1,)),
        mesh=MeshSpec(2),
        layout=BatchLayout("contiguous", 2),
        step=StepSpec(normaliser=2),
    )
    engine, seen = InProcessEngine(), set[torch.dtype]()

    def watch(module: Any, inputs: Sequence[Any], output: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            seen.add(output.dtype)

    run = Run(engine, ref)
    answer = run.answer(case)
    handle = torch.nn.modules.module.register_module_forward_hook(watch)
    try:
        assert_parameters_equal(run(case), answer)
    finally:
        handle.remove()
        engine.close()
    assert seen == {torch.bfloat16}
