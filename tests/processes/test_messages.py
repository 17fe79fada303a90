"""Messages: plain data comes back as it was, bit for bit, and nothing else is sent or taken."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from fsdpcheck.case import LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.errors import NotPlain
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.processes import messages

_NAN = torch.tensor([float("nan"), -0.0, float("inf")])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0),
        torch.zeros(0, 3, dtype=torch.float64),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.ones(1, 1).expand(3, 1)[:, 0],
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        _NAN,
        _NAN.double(),
    ],
)
def test_tensors_come_back_bit_for_bit(value: torch.Tensor) -> None:
    found = messages.loads(messages.dumps(value))
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(value))
    if value.is_floating_point() and value.numel():
        bits = [one.contiguous().reshape(-1).clone().view(torch.uint8) for one in (found, value)]
        assert torch.equal(*bits)
    found.zero_()  # it is nobody else's memory


def test_requests_and_executions_come_back() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(2),)))
    request = RunRequest(case, "reference", instrument=torch.ones(1, 2, 1, dtype=torch.float64))
    there = messages.loads(messages.dumps(request))
    assert there.case == case
    assert torch.equal(there.instrument, request.instrument)
    step = StepRecord({"w": _NAN}, norms=torch.ones(2))
    ranks = [RankResult(0, {"w": _NAN}, [step], [("x", "y", 0, Fraction(1, 3))])]
    found = messages.loads(messages.dumps(Execution("simulated", request, ranks)))
    assert found.ranks[0].observations == ranks[0].observations
    assert torch.equal(found.ranks[0].steps[0].norms, torch.ones(2))
    parameter = messages.loads(messages.dumps(nn.Parameter(torch.ones(2))))
    assert type(parameter) is torch.Tensor


class _Mine(dict[str, int]):
    pass


@pytest.mark.parametrize("value", [_Mine(), nn.Linear, nn.Linear(1, 1), len, lambda: 1, torch.ones(2, device="meta")])
def test_nothing_but_plain_data_is_sent(value: Any) -> None:
    with pytest.raises(NotPlain):
        messages.dumps([value])


@pytest.mark.parametrize("value", [len, _Mine(), nn.Linear(1, 1), messages.dumps])
def test_nothing_but_plain_data_is_taken(value: Any) -> None:
    with pytest.raises(NotPlain, match="which is no plain data"):
        messages.loads(pickle.dumps(value))
