"""The registry of planted bugs: complete entries, planted for the length of a block, hits counted."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from torch import nn

from fsdpcheck.impl import clip, fault, faults
from fsdpcheck.impl.collectives import ALONE
from fsdpcheck.impl.wrap import ShardedModel


def current(planted: fault.Fault) -> Any:
    module, _, path = planted.target.partition(":")
    *classes, attribute = path.split(".")
    owner: Any = importlib.import_module(module if module.startswith("torch") else f"fsdpcheck.impl.{module}")
    for name in classes:
        owner = getattr(owner, name)
    return vars(owner)[attribute]


@pytest.mark.parametrize("name", faults.ALL)
def test_a_fault_is_in_place_inside_the_block_only(name: str) -> None:
    planted = getattr(faults, name)
    original = current(planted)
    with faults.install(name) as installed:
        assert installed is planted
        assert current(planted) is not original
    assert current(planted) is original


@pytest.mark.parametrize("planted", faults.ALL.values(), ids=faults.ALL)
def test_an_entry_says_what_it_plants_and_which_law_must_catch_it(planted: fault.Fault) -> None:
    assert planted.plants.endswith(".")
    assert planted.stands_for
    assert re.fullmatch(r"[a-z0-9.*-]+", planted.caught_by)
    assert planted.cause
    assert not re.search(planted.cause, ""), "silence is not right"


def test_hits_are_counted_from_zero_at_each_entry() -> None:
    planted = faults.ALL["global_norm_of_own_shard"]
    for _ in range(2):
        with planted():
            assert planted.hits == 0
            clip.global_squared_norm(ShardedModel(nn.Linear(1, 1), [], ALONE, True))
            assert planted.hits == 1


def test_a_fault_is_taken_out_when_the_block_fails() -> None:
    original = clip.factors
    with pytest.raises(AssertionError, match="on purpose"), faults.install("eps_omitted"):
        raise AssertionError("on purpose")
    assert clip.factors is original


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(AttributeError, match=r"no fault is named 'nonesuch'; there are .*averaged_twice"):
        _ = faults.nonesuch
