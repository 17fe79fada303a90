"""Which numbers pass through functions of an implementation, and what was raised in them."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.compat import frames_private
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import RankResult, RunRequest
from fsdpcheck.execution.values import OUTSIDE, Unread
from fsdpcheck.program import values
from fsdpcheck.program.values import Values


def doubled(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    return y


def refused(x: Tensor) -> Tensor:
    doubled(x)
    raise ValueError("no")


def test_each_new_value_of_a_variable_is_noted_behind_its_line() -> None:
    result = RankResult(0)
    before = sys.gettrace()
    with Values(result):
        doubled(torch.tensor([1.0, 2.0]))
    assert sys.gettrace() is before
    noted = [(one.name, one.numbers) for one in result.values if one.function == "doubled"]
    assert noted == [("x", (1.0, 2.0)), ("y", (2.0, 4.0)), ("y", (3.0, 5.0)), ("", (3.0, 5.0))]
    first = doubled.__code__.co_firstlineno
    assert [one.place.rpartition(":")[2] for one in result.values][1:] == [str(first + n) for n in (1, 2, 3)]
    assert {one.step for one in result.values} == {OUTSIDE}, "no step is taken"


def test_what_has_too_many_numbers_or_comes_too_late_is_told_and_not_left_out_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, first = RankResult(0), doubled.__code__.co_firstlineno
    with Values(result):
        doubled(torch.zeros(values.NUMBERS + 1))
        doubled(torch.zeros(values.NUMBERS))
    assert {len(one.numbers) for one in result.values} == {values.NUMBERS}
    assert result.unread.large == 3, "x, y and what is returned"
    assert result.unread.first == f"{__file__}:{first + 1} doubled"
    assert not result.unread.cut
    monkeypatch.setattr(values, "VALUES", 2)
    few = RankResult(0)
    with Values(few):
        doubled(torch.tensor([1.0, 2.0]))
    assert len(few.values) == 2
    assert few.unread == Unread(cut=f"{__file__}:{first + 2} doubled")


def written_unseen(x: Tensor) -> float:
    times = 3.0
    x.data.mul_(times)
    return times


def test_what_is_written_past_the_counter_of_versions_is_noted() -> None:
    """As kernels write, and whoever writes to ``data``."""
    result, x = RankResult(0), torch.tensor([1.0, 2.0])
    before = x._version
    with Values(result):
        written_unseen(x)
    assert x._version == before
    assert [one.numbers for one in result.values if one.name == "x"] == [(1.0, 2.0), (3.0, 6.0)]


def test_numbers_of_numpy_are_plain_ones() -> None:
    """Else a run is refused, for it gives what is no plain data."""
    result = RankResult(0)
    with Values(result):
        of_numpy()
    assert [(one.numbers, type(one.numbers[0])) for one in result.values if one.name == "half"] == [((0.5,), float)]


def of_numpy() -> float:
    half = np.float64(0.5)
    return half + 1


def test_of_what_is_raised_frames_and_what_they_called_are_noted() -> None:
    result = RankResult(0)
    with pytest.raises(ValueError, match="no"), Values(result):
        refused(torch.ones(1))
    assert result.raised is not None
    assert result.raised.type == "ValueError"
    assert result.raised.frames[0].endswith(" refused")
    assert [line.partition(" ")[2] for line in result.raised.returned[0]] == ["doubled"]


def test_a_run_gives_the_same_with_values_noted_and_knows_its_steps() -> None:
    step = StepSpec(steps=2, clipping="probe")
    case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(2), BatchLayout("contiguous", 3), step)
    engine = InProcessEngine()
    plain = engine.run(RunRequest(case, "reference", clip_norm=1.0))
    noting = engine.run(RunRequest(case, "reference", clip_norm=1.0, values=True))
    engine.close()
    assert noting.failure is None, noting.failure.text
    for one, other in zip(plain.ranks, noting.ranks, strict=True):
        assert all(
            torch.equal(a, b.params[n])
            for s, b in zip(one.steps, other.steps, strict=True)
            for n, a in s.params.items()
        )
        assert not one.values
        assert {value.step for value in other.values} == {OUTSIDE, 0, 1}
        assert any(value.function.endswith("Trainer.scale") for value in other.values)


def test_triton_is_no_implementation_and_may_be_a_stub() -> None:
    """A module made by hand has no spec, and to ask for it raises ValueError."""
    code = (
        "import sys, types; sys.modules['triton'] = types.ModuleType('triton'); import fsdpcheck.compat.frames_private"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    if (found := PathFinder.find_spec("triton")) is None or found.origin is None:
        pytest.skip("needs triton (Linux): pip install 'fsdpcheck[kernels]'")
    assert frames_private.is_plumbing(str(Path(found.origin).parent / "runtime" / "interpreter.py"))
    assert not frames_private.is_plumbing(str(Path(__file__).parent / "triton" / "kernels.py"))
