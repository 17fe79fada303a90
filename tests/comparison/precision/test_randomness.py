"""What depends on the number of ranks by nature: dropout is off, the rest is noted with its line."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic

X = torch.arange(24.0).reshape(2, 3, 4) / 7


def noted(function: Callable[[], Any], arithmetic: Arithmetic = Arithmetic()) -> tuple[Any, Counter[str]]:  # noqa: B008
    notes: Counter[str] = Counter()
    with installed(), in_arithmetic(arithmetic, notes, 0):
        result = function()
    return result, notes


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def attention(p: float) -> Tensor:
    return F.scaled_dot_product_attention(X, X, X, dropout_p=p)


DROPPING: dict[str, Callable[[float], Tensor]] = {
    "F.dropout": lambda p: F.dropout(X, p),
    "F.dropout1d": lambda p: F.dropout1d(X, p),
    "F.alpha_dropout": lambda p: F.alpha_dropout(X, p, training=True),
    "F.feature_alpha_dropout": lambda p: F.feature_alpha_dropout(X, p, training=True),
    "torch.dropout": lambda p: torch.dropout(X, p, True),
    "nn.Dropout, in place": lambda p: nn.Dropout(p, inplace=True)(X.clone()),
    "torch.native_dropout": lambda p: torch.native_dropout(X, p, True)[0],
    "attention": attention,
}


@pytest.mark.parametrize("averages", [True, False])
def test_without_statistics_of_batches_normalization_is_by_running_averages_which_stay(averages: bool) -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=averages)
    if averages:
        norm.running_mean, norm.running_var = torch.arange(3.0), torch.arange(1.0, 4)
    mean, variance = (norm.running_mean, norm.running_var) if averages else (torch.zeros(3), torch.ones(3))
    expected = F.batch_norm(X, mean, variance)
    given, notes = noted(lambda: norm(X), Arithmetic(batch_statistics=False))
    assert torch.equal(given, expected)
    assert not notes
    if averages:
        assert [*norm.running_mean.tolist(), *norm.running_var.tolist()] == [0, 1, 2, 1, 2, 3]
    ours, notes = noted(lambda: norm(X))
    assert not torch.equal(ours, expected)
    assert [note.split(":")[0] for note in notes] == ["statistics of a batch, which depend on how ranks divide it"]


@pytest.mark.parametrize("way", DROPPING)
def test_nothing_is_dropped(way: str) -> None:
    drop = DROPPING[way]
    before = torch.get_rng_state()
    (result, after), notes = noted(lambda: (drop(0.5), torch.get_rng_state()))
    assert torch.equal(before, after)
    assert torch.equal(result, drop(0.0))
    assert list(notes) == [f"dropout is off at {line_of(attention, 'return') if way == 'attention' else _line(way)}"]
    torch.manual_seed(0)
    assert not torch.equal(drop(0.5), result)


def _line(way: str) -> str:
    with open(__file__, encoding="utf-8") as source:
        number = next(number for number, line in enumerate(source, 1) if line.startswith(f'    "{way}"'))
    return f"{__file__}:{number}"


def test_recurrent_networks_and_attention_modules_drop_nothing() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)

    def run() -> tuple[Tensor, Tensor]:
        return lstm(X)[0], layer(X)

    got, notes = noted(run)
    lstm.eval(), layer.eval()
    expected = run()
    assert torch.equal(got[0], expected[0])
    assert torch.allclose(got[1], expected[1])  # torch computes a layer otherwise when it does not train
    assert set(notes) == {f"dropout is off at {line_of(run, 'return lstm')}"}


def test_what_a_script_does_in_place_to_what_was_dropped_leaves_the_rest_alone() -> None:
    (kept, changed), _ = noted(lambda: ((x := X.clone()), F.dropout(x, 0.5).add_(1)))
    assert torch.equal(kept, X)
    assert torch.equal(changed, X + 1)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_random_numbers_of_a_forward_are_noted_and_those_of_data_are_not() -> None:
    def run() -> Tensor:
        result: Tensor = Noisy()(torch.randn(3))
        return result

    _, notes = noted(run)
    assert notes == {f"random numbers in a forward: aten.randn_like.default at {line_of(Noisy.forward, 'return')}": 1}


def test_statistics_of_a_batch_are_noted_and_those_of_a_sample_are_not() -> None:
    def run() -> None:
        nn.BatchNorm1d(3)(X)
        nn.BatchNorm1d(3).eval()(X)
        nn.InstanceNorm1d(3)(X)
        nn.GroupNorm(1, 3)(X)

    _, notes = noted(run)
    where = line_of(run, "nn.BatchNorm1d(3)(X)")
    assert notes == {f"statistics of a batch, which depend on how ranks divide it: at {where}": 1}


def test_branches_on_values_and_values_read_are_noted() -> None:
    def run() -> None:
        loss = X.sum()
        if loss > 3:
            loss = loss * 2
        loss.item()
        torch.optim.Adam([nn.Parameter(X.clone())]).step()

    _, notes = noted(run)
    assert notes == {
        f"a branch on a value at {line_of(run, 'if loss')}": 1,
        f"a value was read at {line_of(run, 'loss.item')}": 1,
    }


def test_a_script_that_insists_on_a_type_is_noted() -> None:
    def run() -> None:
        x = torch.ones(3)
        assert x.dtype == torch.float32

    notes: Counter[str] = Counter()
    with installed(), pytest.raises(AssertionError), in_arithmetic(Arithmetic("float64"), notes, 0):
        run()
    (note,) = notes
    assert note.startswith("float64 in place of its type was refused, AssertionError")
    assert note.endswith(line_of(run, "assert x.dtype"))


def test_outside_an_arithmetic_nothing_changes() -> None:
    def drawn() -> tuple[Tensor, Tensor, torch.dtype]:
        torch.manual_seed(0)
        return F.dropout(X, 0.5), torch.tensor([0.1]), nn.Linear(2, 2).double().half().weight.dtype

    before = drawn()
    with installed():
        within = drawn()
    assert all(torch.equal(a, b) for a, b in zip(before[:2], within[:2], strict=True))
    assert before[2] == within[2]
    assert "dropout" not in vars(torch._VF)
