"""What a law has to say to be one: a name of its own, a statement, promises that exist."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import UsageError
from fsdpcheck.judging.registry import LAWS, law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import PLAIN, BuiltSpace
from tests.common.cases_by_hand import SMALLEST

SPACE = BuiltSpace(build=lambda features, world_sizes: [SMALLEST])


def test_two_laws_of_one_name_raise() -> None:
    def body(case: TrainingCase, run: Run) -> None:
        """A statement."""

    law("fake.twice", promise="plain", space=SPACE)(body)
    try:
        with pytest.raises(UsageError, match=r"two laws are called 'fake\.twice'"):
            law("fake.twice", promise="plain", space=SPACE)(body)
    finally:
        del LAWS["fake.twice"]


def test_a_law_without_a_statement_or_with_an_unknown_promise_raises() -> None:
    with pytest.raises(UsageError, match="no docstring"):
        law("fake.silent", promise="plain", space=SPACE)(lambda case, run: None)

    def body(case: TrainingCase, run: Run) -> None:
        """A law."""

    for promises in ({"promise": "perfect"}, {"promise": "plain", "needs_promises": ("perfect",)}):
        with pytest.raises(UsageError, match="no promise is called 'perfect'"):
            law("fake.perfect", space=SPACE, **promises)(body)
    assert "fake.perfect" not in LAWS


@pytest.mark.parametrize(
    ("options", "got", "then"),
    [
        ({"draw": lambda features, sizes: [SMALLEST]}, "draw=", "BuiltSpace(build=...) for a function of one's own"),
        ({}, "no space=", "space=PLAIN, or another of fsdpcheck.laws"),
        ({"space": PLAIN, "must_occur": ("hsdp",)}, "must_occur=", 'PLAIN.but(must_occur=("several ranks",))'),
        ({"space": PLAIN, "own_models": False}, "own_models=", 'PLAIN.but(user_models="never")'),
        ({"space": PLAIN, "rank": 2}, "rank=", "leave rank= out"),
    ],
)
def test_a_law_without_a_space_hears_what_to_write(options: dict[str, Any], got: str, then: str) -> None:
    with pytest.raises(UsageError) as refused:
        law("fake.spaceless", promise="plain", **options)
    said = str(refused.value)
    assert f"\n  got     {got}\n  wanted  space=, which says the cases" in said
    assert then in said
    assert "fake.spaceless" not in LAWS


def test_what_every_case_of_a_space_demands_needs_no_second_word() -> None:
    def body(case: TrainingCase, run: Run) -> None:
        """A law."""

    try:
        found = law("fake.real", promise="plain", space=PLAIN.but(numbers="real"), needs_traits=("tied",))(body).law
        assert found.needs_traits == {"real", "tied"}
    finally:
        del LAWS["fake.real"]
