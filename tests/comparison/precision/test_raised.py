"""A raised script equals, bit for bit, the same script written in float64, from the same initial numbers."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    assert_all_is_raised(notes)


def assert_all_is_raised(notes: Counter[str]) -> None:
    assert not [note for note in notes if note.startswith("low precision")]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.half() * 2).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 + 0 * x.bfloat16()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def lowered(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model[0](x)
    return model[1:](hidden.to(torch.bfloat16).to(torch.float32).type(torch.HalfTensor).to(x.dtype))


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "autocast": autocast,
    "casts": lowered,
    "a function of its own": lambda model, x: Doubled.apply(model(x)) / 2,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    "softmax of a type": lambda model, x: torch.softmax(model(x), -1, dtype=torch.float32) * model(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_lower_types_within_a_forward_are_raised(way: str) -> None:
    def gradients(kind: torch.dtype, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = multilayer().to(kind), torch.randn(5, 8).to(kind)
        run(model, x).square().sum().backward()
        return [value.grad for value in model.parameters() if value.grad is not None]

    plain: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
        "softmax of a type": lambda model, x: torch.softmax(model(x), -1) * model(x)
    }
    expected = gradients(torch.float64, plain.get(way, lambda model, x: model(x)))
    with raised() as notes:
        got = gradients(torch.float32, WAYS[way])
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert_all_is_raised(notes)


def test_a_gradient_scaler_scales_in_float64() -> None:
    def run(kind: torch.dtype) -> tuple[list[Tensor], float]:
        torch.manual_seed(1)
        model, x = multilayer().to(kind), torch.randn(3, 5, 8).to(kind)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", growth_interval=2)
        for batch in x:
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [value.detach() for value in model.parameters()], scaler.get_scale()

    expected = run(torch.float64)
    with raised() as notes:
        got = run(torch.float32)
    assert expected[1] == got[1] == 2 * 65536
    assert all(torch.equal(one, other) for one, other in zip(got[0], expected[0], strict=True))
    assert_all_is_raised(notes)


def test_a_gradient_scaler_sees_gradients_that_are_not_finite() -> None:
    with raised():
        parameter = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([parameter], 0.1), torch.amp.GradScaler("cpu")
        scaler.scale(parameter.sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 65536 / 2
        assert parameter.tolist() == [1, 1, 1]


DRAWS: dict[str, Callable[[], Tensor]] = {
    "a parameter of a module": lambda: nn.Linear(5, 7).weight,
    "of a module cast to bfloat16": lambda: nn.Linear(5, 7).bfloat16().weight,
    "of a module made in bfloat16": lambda: nn.Linear(5, 7, dtype=torch.bfloat16).weight,
    "by default in bfloat16": lambda: with_default(torch.bfloat16, lambda: nn.Linear(5, 7).weight),
    "in float64 of the script": lambda: torch.empty(40, dtype=torch.float64).normal_(),
    "a truncated normal": lambda: nn.init.trunc_normal_(torch.empty(6, 6), std=0.02),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(6, 6)),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.Tensor(6, 6)),
    "a slice": lambda: torch.zeros(6, 40)[:, ::2].normal_(0.1, 2),
    "a transposed one": lambda: torch.zeros(6, 40).t().uniform_(-1, 1),
    "like another": lambda: torch.randn_like(torch.zeros(9, dtype=torch.bfloat16)),
    "of a probability": lambda: torch.bernoulli(torch.full((30,), 0.3)),
    "exponential": lambda: torch.empty(20).exponential_(),
    "uniform": lambda: torch.rand(20),
    "in half": lambda: torch.rand(20, dtype=torch.float16),
    "integers": lambda: torch.randint(0, 9, (20,)),
    "integers as floats": lambda: torch.randint(0, 9, (20,), dtype=torch.float32),
    "a permutation": lambda: torch.randperm(20),
    "of weights": lambda: torch.multinomial(torch.arange(1.0, 9), 30, replacement=True),
    "a FloatTensor": lambda: nn.init.xavier_uniform_(torch.FloatTensor(4, 5)),
    "a whole block": lambda: torch.cat([value.flatten() for value in Block().parameters()]),
    "a deep copy, drawn again": lambda: nn.init.normal_(copy.deepcopy(nn.Linear(3, 20)).weight),
}


def with_default(kind: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_is_the_same_number_and_the_generator_is_left_as_it_is(draw: str) -> None:
    def drawn() -> tuple[Tensor, Tensor]:
        torch.manual_seed(11)
        return DRAWS[draw]().detach(), torch.get_rng_state()

    expected, state = drawn()
    with raised() as notes:
        got, state_raised = drawn()
    assert got.dtype == (torch.float64 if expected.is_floating_point() else expected.dtype)
    assert torch.equal(got, expected.to(got.dtype))
    assert torch.equal(state, state_raised)
    assert_all_is_raised(notes)


def test_a_normal_draw_of_computed_means_is_not_rounded() -> None:
    with raised():
        mean = torch.full((9,), 1 / 3)
        torch.manual_seed(1)
        got = torch.normal(mean, 0.5)
        torch.manual_seed(1)
        assert torch.equal(got, mean + 0.5 * torch.randn(9))
    assert not torch.equal(got, got.float().double())


third = 1 / 3
MADE: dict[str, Callable[[], Tensor]] = {
    "torch.tensor": lambda: torch.tensor([third]),
    "torch.tensor of a type": lambda: torch.tensor([third], dtype=torch.float32),
    "torch.as_tensor": lambda: torch.as_tensor([third], dtype=torch.bfloat16),
    "torch.asarray": lambda: torch.asarray([third]),
    "new_tensor": lambda: torch.ones(1).new_tensor([third]),
    "torch.full": lambda: torch.full((1,), third),
    "torch.scalar_tensor": lambda: torch.scalar_tensor(third)[None],
    "integers over a number": lambda: torch.ones(1, dtype=torch.int64) / 3,
    "integers, cast": lambda: torch.ones(1, dtype=torch.int64).float() / 3,
    "where": lambda: torch.where(torch.ones(1) > 0, third, 0.0),
    "one by three": lambda: torch.ones(1).half() / 3,
    "torch.get_default_dtype": lambda: torch.ones(1, dtype=torch.get_default_dtype()) / 3,
    "a list of floats in numpy": lambda: torch.from_numpy(np.array([third])),
    "a mean": lambda: torch.arange(3).float().mean()[None] / 3,
    "filled": lambda: torch.empty(1, dtype=torch.bfloat16).fill_(third),
    "set": lambda: set_item(torch.zeros(1), third),
    "polar": lambda: torch.polar(torch.tensor([third]), torch.zeros(1)).real,
    "a python number": lambda: torch.ones(1, dtype=torch.int64) * third,
}


def set_item(tensor: Tensor, value: float) -> Tensor:
    tensor[0] = value
    return tensor


@pytest.mark.parametrize("way", MADE)
def test_what_is_made_of_numbers_is_not_rounded(way: str) -> None:
    with raised() as notes:
        got = MADE[way]()
    assert got.dtype is torch.float64
    assert got.tolist() == [third]
    assert_all_is_raised(notes)


def loaded() -> Tensor:
    saved = io.BytesIO()
    torch.save({"weight": torch.arange(3).to(torch.bfloat16)}, saved)
    saved.seek(0)
    result: Tensor = torch.load(saved)["weight"]
    return result


ENTERING: dict[str, Callable[[], Tensor]] = {
    "from_numpy": lambda: torch.from_numpy(np.arange(3, dtype=np.float32)),
    "tensor of numpy": lambda: torch.tensor(np.arange(3, dtype=np.float16)),
    "frombuffer": lambda: torch.frombuffer(bytearray(np.arange(3, dtype=np.float32)), dtype=torch.float32),
    "pickle": lambda: pickle.loads(pickle.dumps(torch.arange(3.0))),
    "load": loaded,
    "a parameter of the past": lambda: before_the_run,
}
before_the_run = torch.arange(3.0)


@pytest.mark.parametrize("way", ENTERING)
def test_what_comes_from_elsewhere_is_raised_before_it_is_changed(way: str) -> None:
    global before_the_run
    before_the_run = torch.arange(3.0)
    with raised() as notes:
        got = ENTERING[way]()
        got.div_(3)
    assert got.dtype is torch.float64
    assert got.tolist() == [0, third, 2 / 3]
    assert_all_is_raised(notes)


def test_a_file_of_bytes_saved_in_float32_is_read_as_such() -> None:
    saved, kept = io.BytesIO(), torch.tensor([third])
    torch.save(kept, saved)
    saved.seek(0)
    with raised():
        got = torch.load(saved)
    assert got.tolist() == kept.tolist() != [third]


def test_what_stays_low_is_noted_with_its_line() -> None:
    whole = torch.zeros(4)
    part = whole[:2]
    with raised() as notes:
        part.add_(third)
    assert part.dtype is torch.float32
    (note,) = notes
    assert note.startswith("low precision entered aten.add_.Tensor at ")
    assert __file__ in note
