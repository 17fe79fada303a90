"""What a raised script makes of numbers of Python, of arrays, bytes and files."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.comparison.precision.raising import assert_all_is_raised, raised

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


def test_bits_read_as_another_type_are_noted() -> None:
    with raised() as notes:
        torch.ones(2).view(torch.int32)
        torch.ones(2).view(torch.uint8).view(torch.float32).add_(1)
    (note,) = notes
    assert note.startswith("bits were read as another type")
