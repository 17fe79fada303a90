"""bfloat16: what is proved exact in 8 bits is, on kernels of bfloat16, bit for bit; and most of what is drawn is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from fsdpcheck import drawing, layouts, low_precision, models, oracle, strategies
from fsdpcheck.adapters._base import Features, Promise
from fsdpcheck.case import Arithmetic, Case, Clipping, LayerSpec, ModelSpec, StepSpec, Trait
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.certifier import FLOAT32

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)))
SMALL = Case(ModelSpec((LayerSpec(2), LayerSpec(2)), features=2), arithmetic=Arithmetic("float32", project=False))


def proved(case: Case) -> oracle.Answer | None:
    answer = oracle.answer(case)
    try:
        low_precision.prove(case, answer)
    except NotExact:
        return None
    return answer


def mixed_precision(case: Case, answer: oracle.Answer, k: int, draw: random.Random) -> dict[str, Tensor]:
    """The released gradient of a mixed-precision run: bfloat16 model, float32 loss, two shares reduced in float32."""
    step = answer.steps[k]
    every = [row for row, count in enumerate(step.multiplicity) for _ in range(count)]
    draw.shuffle(every)
    cut = draw.randint(0, len(every))
    total = {name: torch.zeros_like(value) for name, value in step.released.items()}
    for rows in (every[:cut], every[cut:]):
        model = models.build(case)
        model.load_state_dict(step.before, strict=False)
        model = model.to(torch.bfloat16)
        samples = [step.samples[row] for row in rows]
        inputs = layouts.inputs(case)[samples]
        outputs = model(inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs).float()
        packed = torch.cat([layouts.targets(case)[samples], step.targets[rows].float()], 1)
        losses = models.loss_for(case)(outputs, packed)
        (losses.sum() * (case.world_size / case.step.normaliser)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name in total:
                assert parameter.grad.dtype == torch.bfloat16
                total[name] += parameter.grad.float()
    return {name: value / case.world_size for name, value in total.items()}


@pytest.mark.parametrize("family", ["none", "unclipped"])
def test_what_is_proved_has_the_bits_of_float64_on_bfloat16_kernels(family: Clipping) -> None:
    cases = drawing.distinct(strategies.low_precision(EVERYTHING, (1, 2, 3, 4), family), 60)
    found = [(case, answer) for case in cases if (answer := proved(case)) is not None]
    assert len(found) > 30
    differs = 0
    for case, answer in found:
        for k, step in enumerate(answer.steps):
            got = mixed_precision(case, answer, k, random.Random(case.seed))
            assert all(torch.equal(got[name], value) for name, value in step.released.items()), case.describe()
            differs += any(bool(value.any()) for value in step.released.values())
    assert differs > 20


def test_without_the_proof_bfloat16_rounds() -> None:
    """The control: of larger float32 cases, proved exact in 24 bits, some are not in 8, and all those are refused."""
    cases = drawing.distinct(strategies.low_precision(EVERYTHING, (1, 2, 3, 4)), 80, seed=1)
    wide = [replace(case, arithmetic=replace(case.arithmetic, inputs=40)) for case in cases]
    rounded = 0
    for case in wide:
        answer = oracle.answer(case)
        try:
            low_precision.prove(case, answer, FLOAT32)
        except NotExact:
            continue
        got = mixed_precision(case, answer, 0, random.Random(0))
        if not all(torch.equal(got[name], value) for name, value in answer.steps[0].released.items()):
            rounded += 1
            assert proved(case) is None, case.describe()
    assert rounded > 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arithmetic": Arithmetic("float32", inputs=1000, project=False)}, "step 0, low precision, inputs: needs"),
        (
            {
                "model": ModelSpec((LayerSpec(4),)),
                "step": StepSpec("linear"),
                "arithmetic": Arithmetic("float32", weights=1000, project=False),
            },
            r"linear0.weight: needs \d+ bits; had 8",
        ),
        ({"model": ModelSpec((LayerSpec(2, activation="gelu"),))}, "functions with surrogates"),
        ({"step": StepSpec(clipping="exact")}, "clipped samples"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], said: str) -> None:
    case = replace(SMALL, **changes)  # type: ignore[arg-type]
    with pytest.raises(NotExact, match=said):
        low_precision.prove(case, oracle.answer(case))


def test_a_case_that_fits_says_how_many_bits_it_takes() -> None:
    used = low_precision.prove(SMALL, oracle.answer(SMALL))
    assert 0 < used["gradient of tail.linear0.weight"] <= 8
    assert 0 < used["inputs"] <= 2
