"""Tensors by name that have other names than they should: a tied parameter under each of its names is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdpcheck.checks._compare import require_same_form
from fsdpcheck.findings.violation import Violation

TIED = "a tied (shared) parameter stands under each of its names"
WEIGHT, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])


@pytest.mark.parametrize(
    ("got", "wanted", "cause"),
    [
        ({"a": WEIGHT, "b": WEIGHT.clone()}, {"a": OTHER}, f"b is a once more: {TIED}"),
        ({"a": WEIGHT, "b": OTHER}, {"a": WEIGHT}, ""),
        ({"a": WEIGHT, "b": WEIGHT, "c": OTHER}, {"a": WEIGHT}, ""),
        ({"a": WEIGHT, "b": WEIGHT.double()}, {"a": WEIGHT}, ""),
        ({"b": WEIGHT}, {"a": WEIGHT}, ""),
        ({"a": WEIGHT}, {"a": WEIGHT, "b": WEIGHT}, ""),
    ],
)  # fmt: skip
def test_other_names(got: dict[str, Tensor], wanted: dict[str, Tensor], cause: str) -> None:
    with pytest.raises(Violation) as raised:
        require_same_form("names", got, wanted, "step 0")
    missing, extra = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    assert raised.value.got == f"missing {missing}, extra {extra}"
    assert raised.value.cause == cause
