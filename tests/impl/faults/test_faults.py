"""The registry of planted bugs: complete entries, planted for the length of a block, hits counted."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import nn

from fsdpcheck.impl import faults
from fsdpcheck.impl.clipping import clip_factors
from fsdpcheck.impl.faults import _fault as fault
from fsdpcheck.impl.sharding.collectives import ALONE
from fsdpcheck.impl.sharding.flat_model import ShardedModel


def current(planted: fault.Fault) -> Any:
    module, _, path = planted.target.partition(":")
    *classes, attribute = path.split(".")
    owner: Any = importlib.import_module(module if module.startswith("torch") else f"fsdpcheck.impl.{module}")
    for name in classes:
        owner = getattr(owner, name)
    return vars(owner)[attribute]


def test_a_fault_is_in_place_inside_the_block_only() -> None:
    for name in faults.ALL:
        planted = getattr(faults, name)
        original = current(planted)
        with faults.install(name) as installed:
            assert installed is planted
            assert current(planted) is not original, name
        assert current(planted) is original, name


def test_an_entry_says_what_it_plants_and_which_law_must_catch_it() -> None:
    for name, planted in faults.ALL.items():
        assert planted.plants.endswith("."), name
        assert planted.stands_for, name
        assert re.fullmatch(r"[a-z0-9.*-]+", planted.caught_by), name
        assert planted.cause, name
        assert not re.search(planted.cause, ""), f"silence is not right: {name}"


def test_hits_are_counted_from_zero_at_each_entry() -> None:
    planted = faults.ALL["global_norm_of_own_shard"]
    for _ in range(2):
        with planted():
            assert planted.hits == 0
            clip_factors.global_squared_norm(ShardedModel(nn.Linear(1, 1), [], ALONE, True))
            assert planted.hits == 1


def test_a_fault_is_taken_out_when_the_block_fails() -> None:
    original = clip_factors.factors
    with pytest.raises(AssertionError, match="on purpose"), faults.install("eps_omitted"):
        raise AssertionError("on purpose")
    assert clip_factors.factors is original


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("factors_swapped", [2, 1, 4]),
        ("sample_dropped_in_second_pass", [0, 2, 4]),
        ("sample_doubled_in_second_pass", [2, 2, 4]),
        ("squared_norm_off_by_1e_3", [1 - 1e-3, 2, 4]),
    ],
)
def test_a_fault_of_one_sample_is_of_that_sample_in_every_clipping_group(name: str, wanted: list[float]) -> None:
    for groups in ((), (8.0, 1.0)):
        found = torch.tensor([1, 2, 4], dtype=torch.float64)
        expected = torch.tensor(wanted, dtype=torch.float64)
        if groups:
            found, expected = (torch.stack([row * scale for scale in groups]) for row in (found, expected))
        planted = faults.ALL[name].plant(lambda self, found=found: found, lambda: None)
        assert torch.equal(planted(None), expected)


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(AttributeError, match=r"no fault is named 'nonesuch'; there are .*averaged_twice"):
        _ = faults.nonesuch
