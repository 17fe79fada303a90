"""What a law has to say to be one: a name of its own, a statement, promises that exist."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Case
from fsdpcheck.errors import UsageError
from fsdpcheck.judging.registry import LAWS, law
from fsdpcheck.judging.run import Run
from tests.common.cases_by_hand import SMALLEST


def draw(features: Features, world_sizes: tuple[int, ...]) -> st.SearchStrategy[Case]:
    return st.just(SMALLEST)


def test_two_laws_of_one_name_raise() -> None:
    def body(case: Case, run: Run) -> None:
        """A statement."""

    law("fake.twice", promise="plain", draw=draw)(body)
    try:
        with pytest.raises(UsageError, match=r"two laws are called 'fake\.twice'"):
            law("fake.twice", promise="plain", draw=draw)(body)
    finally:
        del LAWS["fake.twice"]


def test_a_law_without_a_statement_or_with_an_unknown_promise_raises() -> None:
    with pytest.raises(UsageError, match="no docstring"):
        law("fake.silent", promise="plain", draw=draw)(lambda case, run: None)

    def body(case: Case, run: Run) -> None:
        """A law."""

    for promises in ({"promise": "perfect"}, {"promise": "plain", "needs_promises": ("perfect",)}):
        with pytest.raises(UsageError, match="no promise is called 'perfect'"):
            law("fake.perfect", draw=draw, **promises)(body)  # type: ignore[arg-type]
    assert "fake.perfect" not in LAWS
