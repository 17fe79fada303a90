"""A raised script equals, bit for bit, the same script written in float64, from the same initial numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entering import in_arithmetic
from fsdpcheck.comparison.precision.entrances import installed

FLOAT64 = Arithmetic("float64")
Result = dict[str, Tensor]


@contextmanager
def raised() -> Iterator[Counter[str]]:
    notes: Counter[str] = Counter()
    with installed(), in_arithmetic(FLOAT64, notes, 0):
        yield notes


def trained(model: nn.Module, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer) -> Result:
    losses = []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return {**{name: value.detach().clone() for name, value in model.state_dict().items()}, "loss": torch.stack(losses)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.more = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = hidden + self.attend(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]
        result: Tensor = self.more(self.norm(hidden)).squeeze(-1)
        return result


def multilayer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


def floats(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(6, width)


def tokens() -> Tensor:
    return torch.randint(0, 11, (6, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "multilayer": (multilayer, floats(8), 4),
    "convolutional": (convolutional, floats(64), 4),
    "attention": (Block, tokens, 5),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, 0.01, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_a_script_is_raised_to_what_it_is_in_float64(case: str, optimizer: str) -> None:
    build, draw, labels = CASES[case]

    def begun() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        torch.manual_seed(3)
        return build(), [(draw(), torch.randn(6, labels)) for _ in range(3)]

    model, batches = begun()
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    model.double()
    batches = [(one.double() if one.is_floating_point() else one, other.double()) for one, other in batches]
    expected = trained(model, batches, OPTIMIZERS[optimizer](model.parameters()))
    with raised() as notes:
        model, batches = begun()
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        got = trained(model, batches, OPTIMIZERS[optimizer](model.parameters()))
    for name, value in initial.items():
        assert value.dtype == (torch.float64 if value.is_floating_point() else torch.int64)
        assert torch.equal(value, drawn[name].to(value.dtype)), name
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
    assert not [note for note in notes if note.startswith("low precision")]
