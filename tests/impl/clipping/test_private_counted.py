"""Unusual modules whose norms and released gradient are those of single samples, one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.impl.clipping import clip_factors
from tests.impl.clipping.test_private_refusals import Forward, Parts
from tests.impl.clipping.test_private_unseen import PASSES, ROWS, loss, step, trainer_of, tripled


def with_its_forward_replaced() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.forward = MethodType(tripled, layer)  # type: ignore[method-assign]
    return nn.Sequential(layer)


def scaled() -> nn.Module:
    model = Parts(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(3, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return model


def told_that_it_is_causal(model: Any, x: Tensor) -> Tensor:
    """The mask lets every position see every other; with this hint torch does not read it."""
    rows, seen = x[..., None], torch.zeros(3, 3, dtype=torch.bool)
    mixed: Tensor = model.a(rows, rows, rows, attn_mask=seen, is_causal=True, need_weights=False)[0]
    return mixed


COUNTED: dict[str, Callable[[], nn.Module]] = {
    "a forward replaced before": with_its_forward_replaced,
    "a parameter without axes": scaled,
    "GRU": lambda: Parts(lambda m, x: m.a(x[..., None])[0][:, -1], a=nn.GRU(1, 2, batch_first=True)),
    "LSTM": lambda: Parts(lambda m, x: m.a(x[..., None])[0][:, -1], a=nn.LSTM(1, 2, batch_first=True)),
    "a causal mask by hint": lambda: Parts(told_that_it_is_causal, a=nn.MultiheadAttention(1, 1, batch_first=True)),
}


class Autocast(nn.Module):
    """A module under autocast, which its backward is not under."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(x)  # type: ignore[no-any-return]


def rounded(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight[None])


def alone_in_a_sequence(model: Any, x: Tensor) -> Tensor:
    mixed: Tensor = model.a(x[:, None], x[:, None], x[:, None])[0]
    return mixed[:, 0]


UNDER_AUTOCAST: dict[str, Callable[[], nn.Module]] = {
    "a layer without a rule": lambda: Forward(rounded),
    "attention": lambda: Parts(alone_in_a_sequence, a=nn.MultiheadAttention(3, 1, batch_first=True)),
}


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_under_autocast_it_is_run_again_as_it_was(name: str, passes: str) -> None:
    """Weights that bfloat16 rounds, to one, so that all else is integers: every bit is the single sample's."""
    module = Autocast(UNDER_AUTOCAST[name]())
    for parameter in module.parameters():
        nn.init.constant_(parameter, 1 + 2.0**-9)
    alone = copy.deepcopy(module)
    trainer = trainer_of(module, passes)
    trainer.loss = lambda y, t: y.float().flatten(1).sum(1)
    step(trainer)
    for row, norm in zip(ROWS, trainer.found.norms[0], strict=True):
        found = torch.autograd.grad(alone(row[None]).float().sum(), list(alone.parameters()), allow_unused=True)
        assert norm == torch.cat([g.flatten() for g in found if g is not None]).square().sum().sqrt()


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", COUNTED)
def test_it_is_counted_as_of_single_samples(name: str, passes: str) -> None:
    torch.manual_seed(0)
    module = COUNTED[name]().double()
    alone = copy.deepcopy(module) if name != "a forward replaced before" else with_its_forward_replaced().double()
    alone.load_state_dict(module.state_dict())
    trainer = trainer_of(module, passes)
    step(trainer, ROWS.double())
    wanted, total = [], {key: torch.zeros_like(value) for key, value in alone.named_parameters()}
    for row in ROWS.double():
        found = torch.autograd.grad(loss(alone(row[None]), row).sum(), list(alone.parameters()))
        wanted.append(torch.cat([gradient.flatten() for gradient in found]).norm())
        for key, gradient in zip(total, found, strict=True):
            total[key] += gradient * clip_factors.factors(wanted[-1].square(), 0.25)
    torch.testing.assert_close(trainer.found.norms[0], torch.stack(wanted))
    torch.testing.assert_close(trainer.model.full_gradients(), total)
