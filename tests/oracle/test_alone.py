"""A user's model alone in the dtypes that it is to compute in: what it gives otherwise there is no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpcheck import oracle
from fsdpcheck.case import Arithmetic, BatchLayout, ModelSpec, TrainingCase
from fsdpcheck.errors import NotExact
from fsdpcheck.oracle import batched_step, certificate
from fsdpcheck.workload.user_model import inspection

TOYS = str(Path(__file__).parent.parent / "toys" / "few_bits_models.py")


@pytest.mark.parametrize(
    ("build", "differs"),
    [
        ("right", []),
        ("mask_filled", []),
        ("mask_added", []),
        ("mask_multiplied", []),
        ("table", []),
        ("wide_weight", [False]),
        ("in_place", [False]),
        ("wide_product", [True]),
    ],
)
def test_what_few_bits_give_otherwise_on_a_single_device_is_no_answer(build: str, differs: list[bool]) -> None:
    """Nothing rounds in what is proved of these; but a copy is no alias, and autocast leaves no product more bits."""
    own = inspection.inspect(f"{TOYS}:{build}", f"{TOYS}:batch").own
    few = Arithmetic("float32", project=False, compute="bfloat16")
    case = TrainingCase(ModelSpec((), own=own), layout=BatchLayout("contiguous", 3), arithmetic=few)
    answers = (oracle.answer(replace(case, seed=seed)) for seed in range(20))
    answer = next(one for one in answers if not _refused(certificate.prove, one.case, one))
    for autocast in (False, True):
        said = _refused(batched_step.require_same_alone, answer.case, answer, autocast)
        assert bool(said) == (autocast in differs)
        assert ("under torch.autocast" in said) == (autocast and bool(said))


def _refused(check: Callable[..., object], *args: object) -> str:
    """What a check says that finds no exact answer."""
    try:
        check(*args)
    except NotExact as error:
        return str(error)
    return ""
