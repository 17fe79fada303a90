"""Functions of torch that a comparison replaces are, for torch.jit, what they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdpcheck.comparison.observation.observer import Observer
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.compat.torch_private import replaced


def _loss(x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, torch.tensor(2.0))


def _ours(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    return ours


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_function_in_the_place_of_one_that_is_replaced_is_scripted_too() -> None:
    with replaced(F, mse_loss=_ours(F.mse_loss)), replaced(F, mse_loss=_ours(F.mse_loss)):
        assert float(torch.jit.script(_loss)(torch.tensor(5.0))) == 9.0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_function_is_scripted_while_what_it_calls_is_replaced() -> None:
    tensor, loss = torch.tensor, F.mse_loss
    with Observer().installed(), installed():
        assert torch.tensor is not tensor
        assert F.mse_loss is not loss
        scripted = torch.jit.script(_loss)
        assert float(scripted(torch.tensor(5.0))) == 9.0
    assert float(torch.jit.script(_loss)(torch.tensor(5.0))) == 9.0
