"""An answer that is computed at the first look at it is the answer, once."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdpcheck import oracle
from fsdpcheck.oracle import Answer
from tests.common.fabricated import SMALL
from tests.common.later import later


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The cases whose answer was computed."""
    found: list[object] = []
    answer = oracle.answer

    def counted(case: Any, *more: Any) -> Answer:
        found.append(case)
        return answer(case, *more)

    monkeypatch.setattr(oracle, "answer", counted)
    return found


def test_what_pytest_asks_of_every_object_of_a_module_computes_nothing(computed: list[object]) -> None:
    found = later(SMALL)
    assert isinstance(found, Answer)
    assert getattr(found, "pytestmark", None) is None
    assert getattr(found, "_mock_name", None) is None
    assert not inspect.isfunction(found)
    assert found.case is SMALL
    assert computed == []


@pytest.mark.parametrize("look", [lambda a: a.steps, lambda a: a.trainable, lambda a: replace(a, clip_norm=1.0)])
def test_a_look_computes_it_once(look: Any, computed: list[object]) -> None:
    found = later(SMALL)
    look(found)
    assert computed == [SMALL]
    right = oracle.answer(SMALL)
    assert type(found) is Answer
    assert vars(found).keys() == vars(right).keys()
    for name, value in right.steps[0].after.items():
        assert torch.equal(found.steps[0].after[name], value)
