"""The first choice that noise changes is told; what comes after another way through the script is not looked at."""

from __future__ import annotations

import torch

from fsdpcheck.comparison.flips import first_flip
from fsdpcheck.comparison.record import Choice, Observation
from tests.comparison.observed import observation, rank


def made(*ranks: list[tuple[str, list[int]]]) -> Observation:
    """By rank, what operators chose."""
    found = observation(*(rank() for _ in ranks))
    for record, choices in zip(found.ranks, ranks, strict=True):
        record.choices = [Choice(name, f"{name}.py:1", torch.tensor(numbers)) for name, numbers in choices]
    return found


CLEAN = made([("argmax", [0, 1, 2]), ("lt", [0, 1])], [("argmax", [2, 2, 2]), ("lt", [0, 1])])


def test_the_first_choice_that_noise_changes_is_told_with_how_many_of_it() -> None:
    late = made([("argmax", [0, 1, 2]), ("lt", [0, 0])], [("argmax", [2, 2, 2]), ("lt", [1, 1])])
    assert first_flip(CLEAN, [CLEAN, late]) == (
        "noise of rounding changes one of the 2 values that a comparison gives at lt.py:1 on rank 0; "
        "what it is given is tied there, or nearly so"
    )
    early = made([("argmax", [0, 1, 2]), ("lt", [0, 1])], [("argmax", [0, 0, 2]), ("lt", [0, 1])])
    told = "noise of rounding changes 2 of the 3 values that argmax gives at argmax.py:1 on rank 1;"
    assert first_flip(CLEAN, [late, early]).startswith(told)


def test_nothing_is_told_where_nothing_changes_or_the_script_has_gone_another_way() -> None:
    assert first_flip(CLEAN, [CLEAN]) == ""
    other = made([("topk", [0, 1, 2]), ("lt", [1, 0])], [])
    assert first_flip(CLEAN, [other]) == ""
